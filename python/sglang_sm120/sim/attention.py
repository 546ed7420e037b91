"""Decode and extend attention over a paged KV pool in plain torch.

These compute what SGLang's Triton kernels `decode_attention_fwd` and `extend_attention_fwd` compute, for the options a
dense or MLA decoder uses. Products and sums run in fp32 whatever the dtype of the inputs; one rounding at the end.
"""

from __future__ import annotations

import torch

# Scores held at once; longer queries are processed in slices so that memory stays near 256 MiB.
_MAX_SCORES = 1 << 26


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    out: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
) -> None:
    """One query row per sequence against all its cached keys.

    Args:
        q: [batch, heads, dim].
        k_buffer: [slots, kv_heads, dim], any float dtype; a 4-D pool of pages is flattened.
        v_buffer: [slots, kv_heads, v_dim].
        out: [batch, heads, v_dim], written.
        kv_indptr: [>= batch + 1] ints; sequence b owns kv_indices[kv_indptr[b]:kv_indptr[b + 1]].
        kv_indices: Slots of the keys in order of position.
        scale: Factor of the scores.
        logit_cap: Scores become cap * tanh(score / cap) when above 0.
    """
    batch = q.shape[0]
    if batch == 0:
        return
    begin = kv_indptr[:batch].long()
    length = kv_indptr[1 : batch + 1].long() - begin
    slots, valid = _padded_slots(kv_indices, begin, length)
    keys = _rows(k_buffer)[slots]
    values = _rows(v_buffer)[slots]
    result = _attend(q.unsqueeze(1), keys, values, valid.unsqueeze(1), scale, logit_cap)
    out.copy_(result.squeeze(1).view_as(out))


def extend_attention(
    q: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    out: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    is_causal: bool,
    mask_indptr: torch.Tensor | None,
    scale: float,
    logit_cap: float = 0.0,
    skip_prefix_custom_mask: bool = True,
) -> None:
    """New rows of each sequence against its cached prefix and against each other.

    Args:
        q: [tokens, heads, dim]; sequence b owns rows qo_indptr[b]:qo_indptr[b + 1].
        k_extend: [tokens, kv_heads, dim], the keys of the new rows.
        v_extend: [tokens, kv_heads, v_dim].
        out: [tokens, heads, v_dim], written.
        k_buffer: [slots, kv_heads, dim], the pool that holds the prefix.
        v_buffer: [slots, kv_heads, v_dim].
        qo_indptr: [batch + 1] ints.
        kv_indptr: [>= batch + 1] ints; prefix slots of b are kv_indices[kv_indptr[b]:kv_indptr[b + 1]].
        kv_indices: Slots of the prefix in order of position.
        custom_mask: Flat; b's part starts at mask_indptr[b] and is [new, prefix + new], nonzero = visible.
        is_causal: Without a custom mask, row i sees new rows 0..i; else all of them.
        mask_indptr: [>= batch] ints, with custom_mask.
        scale: Factor of the scores.
        logit_cap: Scores become cap * tanh(score / cap) when above 0.
        skip_prefix_custom_mask: The mask's prefix columns are ignored: every row sees the whole prefix.
    """
    batch = qo_indptr.shape[0] - 1
    q_begin = qo_indptr.tolist()
    kv_begin = kv_indptr[: batch + 1].tolist()
    mask_begin = mask_indptr[:batch].tolist() if mask_indptr is not None else [0] * batch
    # A pool of latents (MLA) has other heads than expanded keys; it is only read where there is a prefix.
    key_rows, value_rows = _rows(k_buffer), _rows(v_buffer)
    for b in range(batch):
        new = q_begin[b + 1] - q_begin[b]
        prefix = kv_begin[b + 1] - kv_begin[b]
        if new == 0:
            continue
        rows = slice(q_begin[b], q_begin[b + 1])
        keys, values = k_extend[rows], v_extend[rows]
        if prefix:
            slots = kv_indices[kv_begin[b] : kv_begin[b + 1]].long()
            keys = torch.cat([key_rows[slots].to(keys.dtype), keys])
            values = torch.cat([value_rows[slots].to(values.dtype), values])
        visible = torch.ones(new, prefix + new, dtype=torch.bool, device=q.device)
        if custom_mask is not None:
            size = new * (prefix + new)
            given = custom_mask[mask_begin[b] : mask_begin[b] + size].view(new, prefix + new) != 0
            if skip_prefix_custom_mask:
                visible[:, prefix:] = given[:, prefix:]
            else:
                visible = given
        elif is_causal:
            visible[:, prefix:].tril_()
        result = _attend(
            q[rows].unsqueeze(0), keys[None], values[None], visible[None], scale, logit_cap
        )
        out[rows] = result[0].view_as(out[rows])


def _rows(pool: torch.Tensor) -> torch.Tensor:
    return pool.reshape(-1, *pool.shape[-2:]) if pool.dim() == 4 else pool


def _padded_slots(
    kv_indices: torch.Tensor, begin: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, longest] slots and which of them are real; padding repeats the first slot of the list."""
    column = torch.arange(int(length.max()), device=begin.device)
    valid = column < length.unsqueeze(1)
    where = torch.where(valid, begin.unsqueeze(1) + column, 0)
    return kv_indices[where].long(), valid


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    logit_cap: float,
) -> torch.Tensor:
    """[batch, rows, heads, dim] queries, [batch, keys, kv_heads, dim] keys -> [batch, rows, heads, v_dim] in q's dtype."""
    batch, rows, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    k32 = k.float().permute(0, 2, 3, 1)  # batch, kv_heads, dim, keys
    v32 = v.float().permute(0, 2, 1, 3)  # batch, kv_heads, keys, v_dim
    q32 = q.float().view(batch, rows, kv_heads, heads // kv_heads, dim)
    out = q.new_empty(batch, rows, heads, v.shape[-1])
    step = max(1, _MAX_SCORES // max(1, batch * heads * keys))
    for start in range(0, rows, step):
        part = q32[:, start : start + step].permute(
            0, 2, 3, 1, 4
        )  # batch, kv_heads, group, rows, dim
        group, count = part.shape[2], part.shape[3]
        scores = part.reshape(batch, kv_heads, group * count, dim) @ k32
        scores = scores.view(batch, kv_heads, group, count, keys) * scale
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        hidden = ~visible[:, start : start + step]
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        weights = scores.softmax(-1).view(batch, kv_heads, group * count, keys)
        mixed = (weights @ v32).view(batch, kv_heads, group, count, -1)
        out[:, start : start + count] = mixed.permute(0, 3, 1, 2, 4).reshape(
            batch, count, heads, -1
        )
    return out
