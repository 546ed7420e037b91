"""Sums, norms and FP8 of virtual ranks on one GPU against scalar references, for every world and schedule."""

from __future__ import annotations

import pytest
import torch
from rig import VirtualGroup, canonical_sum, inputs, reference_norm, ulps
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.native_how import How

FLAT = ("one_shot", "two_shot")
PARTITIONS = {
    4: "0,1;2,3",
    5: "0-1;2-4",
    6: "0,2,4;1,3,5",
    7: "0;1,2;3-6",
    8: "0-3;4-7",
    16: "0-7;8-15",
}


def parsed(text: str) -> list[list[int]]:
    islands = []
    for island in text.split(";"):
        ranks: list[int] = []
        for item in island.split(","):
            low, _, high = item.partition("-")
            ranks += range(int(low), int(high or low) + 1)
        islands.append(ranks)
    return islands


def same_bits(got: list[torch.Tensor | None], expected: torch.Tensor) -> bool:
    kind = torch.int32 if expected.dtype == torch.float32 else torch.int16
    return all(t is not None and torch.equal(t.view(kind), expected.view(kind)) for t in got)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sum_is_canonical_in_every_flat_schedule(world: int, dtype: torch.dtype) -> None:
    with VirtualGroup(world) as group:
        for schedule in FLAT:
            for rows, hidden in (
                (1, 7168),
                (3, 6144),
                (8, 2880),
                (17, 264),
                (64, 1024),
                (2, 16384),
            ):
                early = world <= 8
                group.pin(Op.ALL_REDUCE, rows, How(schedule, early_launch=early))
                for call in range(4):  # every slot, and a cleared one again
                    parts, _, _ = inputs(world, rows, hidden, dtype, seed=4 * rows + call)
                    got = group.sum(parts)
                    assert same_bits(got, canonical_sum(parts)), (schedule, rows, hidden)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_rows_in_turn_and_rows_at_once_may_follow_each_other(world: int) -> None:
    # With rows in turn a rank keeps copies of its own sums in its inbox; a call with all rows at once must clear them.
    rows, hidden = 32, 1024
    in_turn, at_once = How("two_shot", 1, 4, 1, 8), How("two_shot", 1, 4, 1, 32)
    with VirtualGroup(world) as group:
        for call in range(24):
            how = in_turn if call % 5 in (0, 3) else at_once
            group.pin(Op.ALL_REDUCE_RMSNORM, rows, how)
            parts, residual, weight = inputs(world, rows, hidden, seed=call)
            total = canonical_sum(parts)
            for normed, residual_out in group.norm(parts, residual, weight):
                exact, expected = reference_norm(total, residual, weight, 1e-6)
                assert same_bits([residual_out], expected), (call, how)
                assert ulps(normed, exact) <= 1


@pytest.mark.parametrize("world", sorted(PARTITIONS))
@pytest.mark.parametrize("fp32_partials", [False, True])
def test_islands_sum_canonically_in_every_schedule(world: int, fp32_partials: bool) -> None:
    text = PARTITIONS[world]
    with VirtualGroup(world, islands=text, fp32_partials=fp32_partials) as group:
        for schedule in (*FLAT, "island_two_hop", "island_dataflow", "island_ring"):
            for rows, hidden in ((1, 7168), (5, 2880)):
                group.pin(Op.ALL_REDUCE, rows, How(schedule, early_launch=False))
                parts, _, _ = inputs(world, rows, hidden, seed=rows)
                expected = canonical_sum(parts, parsed(text), fp32_partials)
                for _ in range(3):
                    got = group.sum(parts)
                    assert same_bits(got, expected), (schedule, rows, hidden)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_fused_residual_is_exact_and_norm_within_an_ulp(world: int, dtype: torch.dtype) -> None:
    with VirtualGroup(world) as group:
        for schedule in FLAT:
            for rows, hidden in (
                (1, 7168),
                (2, 6144),
                (4, 7168),
                (8, 6144),
                (16, 7168),
                (32, 7168),
                (64, 6144),
                (100, 2880),
            ):
                if rows > 32 and schedule == "one_shot" and world == 8:
                    continue  # beyond one-shot's part of the slab
                group.pin(Op.ALL_REDUCE_RMSNORM, rows, How(schedule))
                parts, residual, weight = inputs(world, rows, hidden, dtype, seed=rows)
                for gemma in (False, True):
                    got = group.norm(parts, residual, weight, gemma=gemma)
                    exact, residual_out = reference_norm(
                        canonical_sum(parts), residual, weight, 1e-6, gemma
                    )
                    assert same_bits([g[1] for g in got if g], residual_out), (schedule, rows)
                    for g in got:
                        assert g is not None and ulps(g[0], exact) <= (
                            1 if dtype != torch.float32 else 8
                        )
                    assert same_bits([g[0] for g in got if g], got[0][0]), "ranks differ"


@pytest.mark.parametrize("world", [2, 4])
def test_fp32_weight_and_general_kernel_agree_with_the_flat_one(world: int) -> None:
    with VirtualGroup(world) as group:
        for rows in (1, 8, 64):
            parts, residual, weight = inputs(world, rows, 7168, seed=rows)
            plain = group.norm(parts, residual, weight, 1e-5)
            wide = group.norm(parts, residual, weight.float(), 1e-5)
            for a, b in zip(plain, wide):
                assert a is not None and b is not None
                assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("group_size", [0, 128])
def test_fp8_is_what_quantising_the_norm_gives(world: int, group_size: int) -> None:
    with VirtualGroup(world) as group:
        for rows, hidden in ((1, 7168), (4, 6144), (16, 7168), (64, 7168)):
            parts, residual, weight = inputs(world, rows, hidden, seed=rows)
            normed = group.norm(parts, residual, weight)[0]
            assert normed is not None
            values = normed[0].float().view(rows, -1, group_size or hidden)
            most = values.abs().amax(-1)
            scale = most / torch.full_like(most, 448.0)  # by a scalar torch multiplies
            codes = (
                values * torch.where(scale == 0, 0.0, torch.ones_like(scale) / scale)[..., None]
            ).clamp(-448, 448)
            expected = codes.to(torch.float8_e4m3fn).view(rows, hidden)
            for g in group.fp8(parts, residual, weight, group_size):
                assert g is not None
                assert torch.equal(g[1], scale.view(g[1].shape))
                assert torch.equal(g[0].view(torch.uint8), expected.view(torch.uint8))
                assert torch.equal(g[2], normed[1])


@pytest.mark.parametrize("world", [2, 4, 8])
def test_int8_wire_keeps_ranks_identical_and_close(world: int) -> None:
    islands = PARTITIONS.get(world) if world == 8 else None
    with VirtualGroup(world, wire="int8", islands=islands) as group:
        seen = []
        for schedule in (
            FLAT if islands is None else (*FLAT, "island_two_hop", "island_dataflow", "island_ring")
        ):
            for rows in (1, 16):
                group.pin(Op.ALL_REDUCE, rows, How(schedule))
                parts, _, _ = inputs(world, rows, 2880, seed=rows)
                got = group.sum(parts)
                assert got[0] is not None and same_bits(got, got[0])
                exact = torch.stack([p.double() for p in parts]).sum(0)
                error = got[0].double() - exact
                decibel = 10 * torch.log10(exact.pow(2).sum() / error.pow(2).sum())
                assert decibel > 33, decibel
                if rows == 16:
                    seen.append(got[0])
        assert all(torch.equal(s, seen[0]) for s in seen), "schedules differ"


def test_special_values() -> None:
    values = torch.tensor(
        [
            0xFFFF,
            0x7FFF,
            0x7F80,
            0xFF80,
            0x8000,
            0x0000,
            0x0001,
            0x8001,
            0x7F7F,
            0xFF7F,
            0x7FC0,
            0xFFFE,
        ],
        dtype=torch.int32,
    ).to(torch.int16)
    pattern = values.repeat(22)[:256].cuda().view(torch.bfloat16)
    for world in (2, 3, 4):
        with VirtualGroup(world) as group:
            for schedule in FLAT:
                group.pin(Op.ALL_REDUCE, 1, How(schedule))
                for call in range(4):
                    parts = [pattern.roll(r + 7 * call).view(1, 256).clone() for r in range(world)]
                    expected = canonical_sum(parts)
                    for got in group.sum(parts):
                        assert got is not None
                        nan = expected.isnan()
                        assert torch.equal(got.isnan(), nan)
                        assert torch.equal(
                            got.view(torch.int16)[~nan], expected.view(torch.int16)[~nan]
                        )
                        assert (got.view(torch.int16)[nan] == 0x7FFF).all()


@pytest.mark.parametrize("world", [2, 4])
def test_a_row_is_the_same_alone_and_in_a_batch(world: int) -> None:
    with VirtualGroup(world) as group:
        parts, residual, weight = inputs(world, 64, 7168)
        batch = group.norm(parts, residual, weight)[0]
        assert batch is not None
        for rows in (1, 2, 4, 8, 16, 32):
            alone = group.norm([p[5 : 5 + rows] for p in parts], residual[5 : 5 + rows], weight)[0]
            assert alone is not None
            assert torch.equal(alone[0], batch[0][5 : 5 + rows])
            assert torch.equal(alone[1], batch[1][5 : 5 + rows])


def test_every_geometry_gives_the_same_bits() -> None:
    with VirtualGroup(2) as group:
        parts, residual, weight = inputs(2, 4, 7168)
        first = None
        for cluster, warps, per_cta, ctas in (
            (1, 14, 1, 4), (1, 7, 1, 4), (1, 4, 4, 1), (2, 14, 1, 8), (4, 7, 1, 16), (8, 4, 1, 32), (1, 14, 1, 2), (1, 4, 2, 1),
        ):  # fmt: skip
            group.pin(Op.ALL_REDUCE_RMSNORM, 4, How("one_shot", cluster, warps, per_cta, ctas))
            got = group.norm(parts, residual, weight)[1]
            assert got is not None
            first = first or got
            assert torch.equal(got[0], first[0]) and torch.equal(got[1], first[1]), (cluster, warps)


def test_mixed_calls_of_all_kinds_follow_each_other() -> None:
    shapes = [(1, 7168), (64, 7168), (5, 264), (16, 6144), (2, 16384), (33, 1024)]
    for world in (2, 4):
        with VirtualGroup(world) as group:
            for step in range(60):
                rows, hidden = shapes[step * 5 % 6]
                dtype = (torch.bfloat16, torch.float16, torch.float32)[step % 3]
                schedule = FLAT[step // 3 % 2]
                parts, residual, weight = inputs(world, rows, hidden, dtype, seed=step)
                expected = canonical_sum(parts)
                if step % 2:
                    group.pin(Op.ALL_REDUCE, rows, How(schedule))
                    assert same_bits(group.sum(parts), expected), step
                else:
                    group.pin(Op.ALL_REDUCE_RMSNORM, rows, How(schedule))
                    got = group.norm(parts, residual, weight)
                    wanted = reference_norm(expected, residual, weight, 1e-6)[1]
                    assert same_bits([g[1] for g in got if g], wanted), step


def test_tensors_may_begin_between_vectors() -> None:
    with VirtualGroup(2) as group:
        parts, residual, weight = inputs(2, 3, 1024, seed=5)

        def shifted(x: torch.Tensor) -> torch.Tensor:
            """The same values, three elements behind an allocation's start."""
            room = torch.empty(x.numel() + 3, dtype=x.dtype, device=x.device)
            return room[3:].view(x.shape).copy_(x)

        total = canonical_sum(parts)
        assert same_bits(group.sum([shifted(p) for p in parts]), total)
        exact, expected = reference_norm(total, residual, weight, 1e-6)
        moved = [shifted(p) for p in parts], shifted(residual), shifted(weight)
        for normed, residual_out in group.norm(*moved):
            assert same_bits([residual_out], expected) and ulps(normed, exact) <= 1
