"""Torch attention of the CPU platform against a row-by-row reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.sim import attention


def reference_row(q, keys, values, scale, cap=0.0):
    """One query [heads, dim] against keys [n, kv_heads, dim], in float64, head by head."""
    heads, group = q.shape[0], q.shape[0] // keys.shape[1]
    out = torch.empty(heads, values.shape[-1], dtype=torch.float64)
    for head in range(heads):
        score = keys[:, head // group].double() @ q[head].double() * scale
        if cap:
            score = cap * torch.tanh(score / cap)
        weight = torch.exp(score - score.max())
        out[head] = (weight / weight.sum()) @ values[:, head // group].double()
    return out


def paged(lengths, generator):
    """kv_indptr and kv_indices of sequences whose slots are scattered over a pool twice as large."""
    total = sum(lengths)
    slots = torch.randperm(2 * total + 1, generator=generator)[:total]
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return indptr, slots, 2 * total + 1


def tensors(shape, generator, dtype):
    return torch.randn(*shape, generator=generator).to(dtype)


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_decode_equals_reference(dtype, heads, kv_heads, cap):
    draw = torch.Generator().manual_seed(heads * 10 + kv_heads)
    lengths = [5, 1, 17]
    indptr, slots, pool = paged(lengths, draw)
    k = tensors((pool, kv_heads, 16), draw, dtype)
    v = tensors((pool, kv_heads, 8), draw, dtype)
    q = tensors((3, heads, 16), draw, dtype)
    out = torch.full((3, heads, 8), math.nan, dtype=dtype)
    attention.decode_attention(q, k, v, out, indptr, slots, 0.25, cap)
    for row, (begin, end) in enumerate(zip(indptr, indptr[1:])):
        own = slots[begin:end]
        want = reference_row(q[row], k[own], v[own], 0.25, cap)
        torch.testing.assert_close(out[row].double(), want, atol=TOLERANCE[dtype], rtol=0.02)


def test_decode_reads_mla_values_as_a_view_of_the_latents():
    draw = torch.Generator().manual_seed(3)
    latents = torch.randn(9, 1, 24, generator=draw)
    q = torch.randn(1, 4, 24, generator=draw)
    out = torch.empty(1, 4, 16)
    slots = torch.tensor([7, 2, 5])
    attention.decode_attention(q, latents, latents[..., :16], out, torch.tensor([0, 3]), slots, 0.2)
    want = reference_row(q[0], latents[slots], latents[slots][..., :16], 0.2)
    torch.testing.assert_close(out[0].double(), want, atol=2e-5, rtol=1e-4)


def test_decode_of_an_empty_batch_and_of_a_paged_pool():
    out = torch.empty(0, 2, 4)
    empty = torch.zeros(1, dtype=torch.int32)
    attention.decode_attention(
        out, torch.zeros(3, 2, 4), torch.zeros(3, 2, 4), out, empty, empty, 1
    )
    draw = torch.Generator().manual_seed(5)
    pool = torch.randn(4, 2, 2, 8, generator=draw)  # pages, slots per page, heads, dim
    flat = pool.view(8, 2, 8)
    q, slots = torch.randn(1, 2, 8, generator=draw), torch.tensor([6, 1, 3])
    got, want = torch.empty(1, 2, 8), torch.empty(1, 2, 8)
    indptr = torch.tensor([0, 3])
    attention.decode_attention(q, pool, pool, got, indptr, slots, 0.3)
    attention.decode_attention(q, flat, flat, want, indptr, slots, 0.3)
    assert torch.equal(got, want)


@settings(max_examples=40, deadline=None)
@given(
    prefixes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    news=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    mode=st.sampled_from(["causal", "full", "mask", "mask with prefix"]),
    seed=st.integers(0, 10_000),
)
def test_extend_equals_reference(prefixes, news, mode, seed):
    draw = torch.Generator().manual_seed(seed)
    news = news[: len(prefixes)]
    heads, kv_heads, dim = 4, 2, 8
    kv_indptr, slots, pool = paged(prefixes, draw)
    qo = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()])
    total = int(qo[-1])
    q, k, v = (torch.randn(total, h, dim, generator=draw) for h in (heads, kv_heads, kv_heads))
    k_pool, v_pool = (torch.randn(pool, kv_heads, dim, generator=draw) for _ in range(2))
    masks = [
        torch.randint(0, 2, (new, prefix + new), generator=draw).bool()
        for prefix, new in zip(prefixes, news)
    ]
    for prefix, mask in zip(prefixes, masks):
        mask[:, prefix:].fill_diagonal_(True)  # a row that sees nothing has no answer
    sizes = torch.tensor([mask.numel() for mask in masks])
    mask_indptr = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    flat = torch.cat([mask.flatten() for mask in masks])
    out = torch.full((total, heads, dim), math.nan)
    masked = mode.startswith("mask")
    attention.extend_attention(
        q, k, v, out, k_pool, v_pool, qo, kv_indptr, slots,
        flat if masked else None, mode == "causal", mask_indptr if masked else None,
        0.35, skip_prefix_custom_mask=mode != "mask with prefix",
    )  # fmt: skip
    for b, (prefix, new) in enumerate(zip(prefixes, news)):
        own = slots[kv_indptr[b] : kv_indptr[b + 1]]
        rows = slice(int(qo[b]), int(qo[b + 1]))
        keys, values = torch.cat([k_pool[own], k[rows]]), torch.cat([v_pool[own], v[rows]])
        for row in range(new):
            seen = torch.ones(prefix + new, dtype=torch.bool)
            if mode == "causal":
                seen[prefix + row + 1 :] = False
            elif mode == "mask":
                seen[prefix:] = masks[b][row, prefix:]
            elif masked:
                seen = masks[b][row]
            want = reference_row(q[rows][row], keys[seen], values[seen], 0.35)
            torch.testing.assert_close(out[rows][row].double(), want, atol=2e-5, rtol=1e-4)


def test_extend_in_slices_gives_the_same_bits(monkeypatch):
    draw = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(13, 2, 8, generator=draw) for _ in range(3))
    pool, none = torch.zeros(1, 2, 8), torch.zeros(2, dtype=torch.int32)
    results = []
    for limit in (1 << 26, 2 * 13 * 4):
        monkeypatch.setattr(attention, "_MAX_SCORES", limit)
        out = torch.empty_like(q)
        attention.extend_attention(
            q, k, v, out, pool, pool, torch.tensor([0, 13]), none, none, None, True, None, 0.3
        )
        results.append(out)
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=0)


def test_extend_without_prefix_never_touches_a_pool_of_other_shape():
    draw = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(3, 4, 12, generator=draw) for _ in range(3))
    latents = torch.full((5, 1, 20), math.nan)
    out, none = torch.empty_like(q), torch.zeros(2, dtype=torch.int32)
    attention.extend_attention(
        q, k, v, out, latents, latents[..., :16], torch.tensor([0, 3]), none, none, None, True, None, 0.3
    )  # fmt: skip
    for row in range(3):
        want = reference_row(q[row], k[: row + 1], v[: row + 1], 0.3)
        torch.testing.assert_close(out[row].double(), want, atol=2e-5, rtol=1e-4)
