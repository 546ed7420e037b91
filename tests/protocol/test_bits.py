"""Every schedule, island layout, CTA count and codec gives the bits of the canonical sum, on every rank."""

from __future__ import annotations

import pytest
import torch
from protocol_oracle import canonical_sum, per_token_fp8, rmsnorm_chain, ulps
from protocol_rig import (
    LAYOUTS,
    World,
    islands_of,
    random_inputs,
    same_bits,
    schedules_for,
)

torch.set_num_threads(1)
CAPACITY = {"capacity": 1 << 18}
TORN = {"fabric": 1, "jitter_ns": 2000, "shuffle": 1, "longest_stall_ns": 3000}
WORLDS = [(world, layout) for world, layouts in LAYOUTS.items() for layout in layouts]


def assert_sum(outputs: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    for rank in range(outputs.shape[0]):
        assert same_bits(outputs[rank], expected), (what, f"rank {rank}")


@pytest.mark.parametrize("special", [False, True], ids=["random", "special"])
@pytest.mark.parametrize(("world", "layout"), WORLDS)
def test_every_schedule_gives_the_canonical_bits(world: int, layout: str, special: bool) -> None:
    islands = islands_of(world, layout)
    with World(world, layout, {"seed": world, **CAPACITY, **TORN, "tear": 4}) as rig:
        for dtype in ("bf16", "fp16", "fp32"):
            x = random_inputs(world, 2, 840, dtype, seed=world, special=special)
            for fp32_partials in (False, True):
                expected = canonical_sum(x, islands, fp32_partials=fp32_partials)
                results = {
                    (schedule, ctas): rig.add(x, schedule, ctas=ctas, fp32_partials=fp32_partials)
                    for schedule in schedules_for(world)
                    for ctas in (1, 3)
                }
                assert rig.run() == [""] * world
                for key, result in results.items():
                    assert_sum(result.out, expected, (key, dtype, fp32_partials))


@pytest.mark.parametrize("tear", [2, 4, 8, 16])
def test_torn_stores_never_show(tear: int) -> None:
    # 16-bit lanes survive tearing at 2 bytes; fp32 lanes need stores that are whole at 4.
    for dtype in ("bf16", "fp16") if tear == 2 else ("bf16", "fp32"):
        x = random_inputs(4, 3, 264, dtype, seed=tear, special=True)
        expected = canonical_sum(x, islands_of(4, "0,1;2,3"))
        settings = {"seed": tear, **CAPACITY, **TORN, "tear": tear}
        with World(4, "0,1;2,3", settings) as rig:
            results = [rig.add(x, s, ctas=2) for s in schedules_for(4) for _ in range(3)]
            assert rig.run() == [""] * 4
            for result in results:
                assert_sum(result.out, expected, (tear, dtype))


@pytest.mark.parametrize(("world", "layout"), [(2, ""), (4, "0,1;2,3"), (5, "0,1;2,3,4"), (8, "")])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_int8_wire_equals_its_definition_on_every_rank(world: int, layout: str, dtype: str) -> None:
    x = random_inputs(world, 3, 328, dtype, seed=3) * 3
    x[0, 1, 40:72] = 0
    x[-1, 2, 300] = float("inf")
    expected = canonical_sum(x, islands_of(world, layout), wire="int8")
    assert torch.isnan(expected[2, 300])
    with World(world, layout, {"seed": 1, **CAPACITY, **TORN, "tear": 2}) as rig:
        results = [
            rig.add(x, s, wire="int8", ctas=ctas) for s in schedules_for(world) for ctas in (1, 2)
        ]
        assert rig.run() == [""] * world
        for result in results:
            assert_sum(result.out, expected, (world, layout))
    exact = canonical_sum(x, islands_of(world, layout))
    finite = torch.isfinite(expected)
    error = (expected.double() - exact.double())[finite]
    sqnr = 10 * torch.log10(exact.double()[finite].pow(2).mean() / error.pow(2).mean())
    # Up to three roundings of 8-bit codes: 35 dB is what a uniform error of that step leaves.
    assert sqnr > 35


def test_a_row_gives_the_same_bits_alone_and_in_a_batch_of_64() -> None:
    weight = torch.randn(328).bfloat16()
    residual = torch.randn(64, 328).bfloat16()
    for world, layout in ((2, ""), (4, "0,1;2,3"), (6, "0,1;2,3;4,5")):
        x = random_inputs(world, 64, 328, "bf16", seed=8)
        for wire in ("lossless", "int8"):
            with World(world, layout, {"seed": 2, **CAPACITY}) as rig:
                norm = {"op": "all_reduce_rmsnorm", "weight": weight, "wire": wire}
                batch = rig.add(x, "island_dataflow", ctas=4, residual=residual, **norm)
                alone = [
                    rig.add(x[:, r : r + 1], s, residual=residual[r : r + 1], **norm)
                    for r in (0, 31, 63)
                    for s in schedules_for(world)
                ]
                assert rig.run() == [""] * world
            for index, r in enumerate((0, 31, 63)):
                for result in alone[index * 6 : index * 6 + 6]:
                    assert same_bits(result.out[:, 0], batch.out[:, r])
                    assert same_bits(result.residual_out[:, 0], batch.residual_out[:, r])


@pytest.mark.parametrize("gemma", [False, True], ids=["plain", "gemma"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("hidden", [8, 264, 2880, 7168])
def test_residual_and_norm_follow_the_unfused_chain(hidden: int, dtype: str, gemma: bool) -> None:
    world, layout = 4, "0,1;2,3"
    x = random_inputs(world, 3, hidden, dtype, seed=hidden)
    residual = random_inputs(1, 3, hidden, dtype, seed=5)[0]
    for weight_dtype in {x.dtype, torch.float32}:
        weight = torch.randn(hidden, generator=torch.Generator().manual_seed(1)).to(weight_dtype)
        total = canonical_sum(x, islands_of(world, layout))
        normed, residual_out = rmsnorm_chain(total, residual, weight, 1e-5, gemma)
        with World(world, layout, {"seed": 4, **CAPACITY}) as rig:
            results = [
                rig.add(
                    x,
                    schedule,
                    op="all_reduce_rmsnorm",
                    ctas=ctas,
                    residual=residual,
                    weight=weight,
                    eps=1e-5,
                    gemma=gemma,
                )
                for schedule in schedules_for(world)
                for ctas in (1, 5)
            ]
            assert rig.run() == [""] * world
        for result in results:
            for rank in range(world):
                assert same_bits(result.residual_out[rank], residual_out)
                assert same_bits(result.out[rank], results[0].out[0])
                # fp32 sums squares in another order than torch; the 16-bit results may round apart by one.
                assert ulps(result.out[rank], normed) <= (8 if dtype == "fp32" else 1)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_fp8_epilogue_equals_the_per_token_quantiser(dtype: str) -> None:
    world, hidden = 3, 2880
    x = random_inputs(world, 5, hidden, dtype, seed=11)
    x[:, 4] = 0
    residual = random_inputs(1, 5, hidden, dtype, seed=12)[0]
    residual[4] = 0
    weight = torch.randn(hidden).to(x.dtype)
    norm = {"residual": residual, "weight": weight, "eps": 1e-6}
    with World(world, "0,1;2", {"seed": 1, **CAPACITY}) as rig:
        plain = rig.add(x, "two_shot", op="all_reduce_rmsnorm", **norm)
        results = [
            rig.add(x, schedule, op="all_reduce_rmsnorm_fp8", ctas=2, **norm)
            for schedule in schedules_for(world)
        ]
        assert rig.run() == [""] * world
    codes, scales = per_token_fp8(plain.out[0])
    assert scales[4] == 0 and scales[0] > 0
    for result in results:
        for rank in range(world):
            assert same_bits(result.scales[rank], scales)
            assert torch.equal(result.codes[rank], codes)
            assert same_bits(result.residual_out[rank], plain.residual_out[0])


def test_conversions_equal_torch_for_every_bit_pattern() -> None:
    # World 1 sends nothing: the sum of one is the value itself, rounded and canonicalised.
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).reshape(256, 256)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype)[None]
        with World(1, "", {"capacity": 1 << 20}) as rig:
            result = rig.add(x, "one_shot")
            assert rig.run() == [""]
        assert same_bits(result.out[0], canonical_sum(x, [[0]]))
