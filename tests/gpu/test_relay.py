"""The relay on virtual ranks of one GPU: bits, special values, mixes with calls in tiles, graphs, faults.

Slabs lie in device memory here; tests/gpu/test_processes_gpu.py runs the relay in pinned host memory.
"""

from __future__ import annotations

import time

import pytest
import torch
from rig import VirtualGroup, canonical_sum, inputs, reference_norm, ulps
from sglang_sm120.comm.communicator import CollectiveError, Op
from sglang_sm120.comm.native_how import RELAYS, How

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def group_of(world: int, **options: object) -> VirtualGroup:
    return VirtualGroup(world, way="host", relay=True, **options)  # type: ignore[arg-type]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def check_sum(group: VirtualGroup, rows: int, hidden: int, dtype: torch.dtype, seed: int) -> None:
    parts, _, _ = inputs(group.world, rows, hidden, dtype, seed=seed)
    expected = canonical_sum(parts)
    for out in group.sum(parts):
        assert torch.equal(bits(out), bits(expected)), (rows, hidden, dtype, seed)


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_canonical_in_both_forms(world: int, dtype: torch.dtype) -> None:
    shapes = [(1, 7168), (2, 8), (3, 6144), (8, 2880), (17, 264), (64, 1024), (2, 16384)]
    with group_of(world) as group:
        for form in RELAYS:
            for rows, hidden in shapes:
                group.pin(Op.ALL_REDUCE, rows, How(form, early_launch=world <= 8))
                for call in range(4):  # both slots, twice
                    check_sum(group, rows, hidden, dtype, 4 * rows + call)
        assert not any(group.dirty(rank) for rank in range(world))


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_number_of_rows_and_the_capacity(world: int) -> None:
    # The same data as whatever went before: rows 1..64, then exactly a full outbox, then one row again.
    with group_of(world, capacity_bytes=1 << 20) as group:
        for form in RELAYS:
            for rows in (*range(1, 65), 73, 1):
                group.pin(Op.ALL_REDUCE, rows, How(form))
                check_sum(group, rows, 7168, torch.bfloat16, rows)
            group.pin(Op.ALL_REDUCE, 2048, How(form))
            check_sum(group, 2048, 256, torch.bfloat16, 1)  # as many rows as there are flags
            assert not group.ranks[0].admits(Op.ALL_REDUCE, 2049, 256, torch.bfloat16)
        assert not any(group.dirty(rank) for rank in range(world))


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", RELAYS)
def test_residual_is_exact_and_norm_within_an_ulp(
    world: int, dtype: torch.dtype, form: str
) -> None:
    with group_of(world) as group:
        for rows, hidden in ((1, 7168), (3, 6144), (16, 7168), (33, 2880), (100, 1024), (2, 16384)):
            group.pin(Op.ALL_REDUCE_RMSNORM, rows, How(form))
            parts, residual, weight = inputs(world, rows, hidden, dtype, seed=rows)
            total = canonical_sum(parts)
            for gemma in (False, True):
                exact, expected = reference_norm(total, residual, weight, 1e-6, gemma)
                got = group.norm(parts, residual, weight, gemma=gemma)
                for normed, residual_out in got:
                    assert torch.equal(bits(residual_out), bits(expected)), (rows, hidden)
                    assert ulps(normed, exact) <= (1 if dtype != torch.float32 else 8)
                    assert torch.equal(bits(normed), bits(got[0][0])), "ranks differ"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("form", RELAYS)
def test_norms_and_fp8_equal_those_of_the_tile_forms(world: int, form: str) -> None:
    with group_of(world) as group:
        for rows in (1, 8, 64):
            parts, residual, weight = inputs(world, rows, 7168, seed=rows)
            got: dict[str, list[tuple[torch.Tensor, ...]]] = {}
            for schedule in ("two_shot", form):
                for op in (Op.ALL_REDUCE_RMSNORM, Op.ALL_REDUCE_RMSNORM_FP8):
                    group.pin(op, rows, How(schedule))
                got[schedule] = [
                    *group.norm(parts, residual, weight),
                    *group.fp8(parts, residual, weight, 0),
                    *group.fp8(parts, residual, weight, 128),
                ]
            for a, b in zip(got[form], got["two_shot"], strict=True):
                for x, y in zip(a, b, strict=True):
                    assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), rows
            group.pin(Op.ALL_REDUCE_RMSNORM, rows, How(form))
            plain = group.norm(parts, residual, weight)
            for a, b in zip(group.norm(parts, residual, weight.float()), plain):
                assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]), "fp32 weight"


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("form", RELAYS)
def test_special_values(world: int, form: str) -> None:
    raw = [0xFFFF, 0x7FFF, 0x7F80, 0xFF80, 0x8000, 0, 1, 0x8001, 0x7F7F, 0xFF7F, 0x7FC0, 0xFFFE]
    values = torch.tensor(raw, dtype=torch.int32).to(torch.int16)
    pattern = values.repeat(22)[:256].cuda().view(torch.bfloat16)
    with group_of(world) as group:
        group.pin(Op.ALL_REDUCE, 1, How(form))
        for call in range(4):
            parts = [pattern.roll(r + 7 * call).view(1, 256).clone() for r in range(world)]
            expected = canonical_sum(parts)
            nan = expected.isnan()
            for out in group.sum(parts):
                assert torch.equal(bits(out)[~nan], bits(expected)[~nan])
                assert (bits(out)[nan] == 0x7FFF).all()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_relay_and_tile_forms_of_all_shapes_follow_each_other(world: int) -> None:
    # Wide calls leave flags behind; narrow ones, other forms and dtypes come between; tiles must be cleared.
    shapes = [(64, 7168), (1, 7168), (40, 264), (5, 2880), (2, 16384), (33, 1024), (128, 256)]
    forms = (*RELAYS, "two_shot", RELAYS[1], "one_shot", RELAYS[0], RELAYS[0])
    with group_of(world) as group:
        for step in range(90):
            rows, hidden = shapes[step * 5 % 7]
            form = forms[step * 3 % 7 if step % 2 else step % 7]
            group.pin(Op.ALL_REDUCE, rows, How(form, ctas=0 if "relay" not in form else step % 5))
            check_sum(group, rows, hidden, DTYPES[step % 3], step)
            assert not any(group.dirty(rank) for rank in range(world)), (step, form)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("form", RELAYS)
def test_graphs_of_odd_counts_and_eager_calls_take_turns(world: int, form: str) -> None:
    with group_of(world, schedule=form) as group:
        graphs = []
        for rows, hidden, calls in ((1, 7168, 3), (64, 7168, 1), (8, 2880, 5), (20, 264, 2)):
            parts, _, _ = inputs(world, rows, hidden, seed=rows)
            captured = []
            for rank, communicator in enumerate(group.ranks):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=group.streams[rank]):
                    outs = [communicator.all_reduce(parts[rank]) for _ in range(calls)]
                captured.append((graph, outs))
            graphs.append((parts, captured))
        generator = torch.Generator(device="cuda").manual_seed(1)
        for step in range(24):
            parts, captured = graphs[step * 7 % 4]
            for part in parts:
                part.copy_(torch.randn(part.shape, generator=generator, device="cuda"))
            for _, outs in captured:
                for out in outs:
                    out.fill_(float("nan"))
            torch.cuda.synchronize()
            for rank, (graph, _) in enumerate(captured):
                with torch.cuda.stream(group.streams[rank]):
                    graph.replay()
            torch.cuda.synchronize()
            expected = canonical_sum(parts)
            assert all(torch.equal(out, expected) for _, outs in captured for out in outs), step
            if step % 3 == 0:
                check_sum(group, 1 + step, 7168, torch.bfloat16, step)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("form", RELAYS)
def test_missing_rank_is_named_within_the_bound_and_the_group_recovers(
    world: int, form: str
) -> None:
    with group_of(world, timeout_ms=200, schedule=form) as group:
        parts, residual, weight = inputs(world, 4, 7168)
        call = lambda c, r: c.all_reduce_rmsnorm(parts[r], residual, weight, 1e-6)  # noqa: E731
        group.each(call)
        began = time.monotonic()
        got = group.each(call, skip=[1])
        assert time.monotonic() - began < 2.0
        assert got[0] is not None and got[0][0].isnan().any()
        texts = [c.describe_failure() for r, c in enumerate(group.ranks) if r != 1]
        sentence = "rank 1 is missing in all_reduce_rmsnorm, 4 x 7168 bfloat16"
        assert any(sentence in text for text in texts), texts
        for rank, communicator in enumerate(group.ranks):
            if rank != 1:
                with pytest.raises(CollectiveError, match="rank 1"):
                    communicator.check()
        group.recover()
        for out in group.sum(parts):
            assert torch.equal(out, canonical_sum(parts))


def test_another_shape_or_form_is_a_call_mismatch_on_all_ranks() -> None:
    with group_of(3, timeout_ms=200, schedule=RELAYS[0]) as group:
        big, _, _ = inputs(3, 5, 7168)
        group.each(lambda c, r: c.all_reduce(big[r][:4] if r == 1 else big[r]))
        for communicator in group.ranks[:2]:
            text = communicator.describe_failure()
            assert "call mismatch" in text and "5 x 7168" in text and "4 x 7168" in text
        assert all(c.failed for c in group.ranks)
        group.recover()
        group.ranks[2].pin(Op.ALL_REDUCE, 5, How(RELAYS[1]))
        group.each(lambda c, r: c.all_reduce(big[r]))
        assert all(c.failed for c in group.ranks)


def test_a_flag_left_behind_is_never_taken_for_a_new_one() -> None:
    # Ranks late by 10 ms: a peer that took an old flag of the same row and slot would sum old data.
    with group_of(2, timeout_ms=2000, schedule=RELAYS[0]) as group:
        for step in range(8):
            rows = 16 if step % 4 in (0, 1) else 1
            parts, _, _ = inputs(2, rows, 1024, seed=step)

            def late(communicator, rank):  # type: ignore[no-untyped-def]
                if rank == step % 2:  # noqa: B023
                    torch.cuda._sleep(20_000_000)
                return communicator.all_reduce(parts[rank])  # noqa: B023

            for out in group.each(late):
                assert out is not None and torch.equal(out, canonical_sum(parts)), step
