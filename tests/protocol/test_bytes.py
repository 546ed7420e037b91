"""Bytes are counted on the running engine, and compared with the formulas and with the lower bounds."""

from __future__ import annotations

import pytest
from protocol_rig import LAYOUTS, World, random_inputs, schedules_for
from sglang_sm120.comm.bounds import boundary_bound, egress_bound, formula
from sglang_sm120.comm.schedule import describe, moves

CASES = [
    (world, layout, schedule)
    for world, layouts in LAYOUTS.items()
    for layout in layouts
    for schedule in schedules_for(world)
]


@pytest.mark.parametrize(
    ("wire", "fp32_partials"), [("lossless", False), ("lossless", True), ("int8", False)]
)
def test_the_engine_sends_exactly_what_the_description_says(wire: str, fp32_partials: bool) -> None:
    for world, layout, schedule in CASES:
        if world > 8 and wire == "int8":
            continue
        x = random_inputs(world, 2, 840, "bf16", seed=1)
        with World(world, layout, {"capacity": 1 << 18, "seed": 1}) as rig:
            rig.add(x, schedule, wire=wire, fp32_partials=fp32_partials, ctas=2)
            assert rig.run() == [""] * world
            counted = rig.edge_bytes()
        described = describe(
            schedule,
            world=world,
            islands=layout,
            rows=2,
            hidden=840,
            wire=wire,
            fp32_partials=fp32_partials,
        )
        assert counted == described.edges, (world, layout, schedule)
        stores = moves(
            schedule,
            world=world,
            islands=layout,
            rows=2,
            hidden=840,
            wire=wire,
            fp32_partials=fp32_partials,
        )
        assert sum(m.bytes for m in stores) == sum(f.bytes for f in described.flows)
        assert len(stores) == sum(f.tiles for f in described.flows)


@pytest.mark.parametrize(("world", "layout", "schedule"), CASES)
def test_bytes_equal_the_documented_formula(world: int, layout: str, schedule: str) -> None:
    # A number of whole tiles that every group size up to 16 divides, so no share is rounded.
    described = describe(schedule, world=world, islands=layout, rows=45, hidden=16 * 1024)
    sizes = [len(island) for island in described.islands]
    message = described.message_bytes
    if any(45 * 64 % size for size in (*sizes, world)):
        pytest.skip("shares of this partition are not whole tiles")
    expected = formula(schedule, sizes)
    for rank in range(world):
        assert described.egress[rank] == pytest.approx(
            expected.egress[described.island_of[rank]] * message
        )
    for (a, b), crossed in described.boundaries.items():
        assert crossed == pytest.approx(expected.boundary[a, b] * message), (a, b)


@pytest.mark.parametrize(
    ("world", "layout", "best"),
    [
        (2, "", "one_shot"),
        (2, "", "two_shot"),
        (4, "", "two_shot"),
        (8, "", "two_shot"),
        (4, "0,1;2,3", "island_dataflow"),
        (6, "0-2;3-5", "island_dataflow"),
        (8, "0-3;4-7", "island_dataflow"),
        (8, "0-3;4-7", "island_ring"),
        (8, "0-2;3-7", "island_dataflow"),
        (16, "0-7;8-15", "island_dataflow"),
    ],
)
def test_the_best_schedule_is_within_5_percent_of_the_lower_bound(
    world: int, layout: str, best: str
) -> None:
    for rows, hidden in ((4, 7168), (16, 6144), (64, 7168)):
        described = describe(best, world=world, islands=layout, rows=rows, hidden=hidden)
        sizes = [len(island) for island in described.islands]
        message = described.message_bytes
        for crossed in described.boundaries.values():
            assert crossed <= 1.05 * boundary_bound(sizes) * message
            assert crossed >= boundary_bound(sizes) * message
        floor = max(egress_bound(sizes, size) for size in sizes)
        # Whole tiles: an owner may hold one tile more than its share in each hop.
        slack = 3 * 512 * max(sizes)
        assert max(described.egress) <= 1.05 * floor * message + slack
        assert max(described.egress) >= 0.999 * floor * message


def test_island_dataflow_crosses_once_where_others_cross_4_and_16_times() -> None:
    crossed = {
        schedule: max(
            describe(schedule, world=8, islands="0-3;4-7", rows=4, hidden=7168).boundaries.values()
        )
        / (4 * 7168 * 2)
        for schedule in ("one_shot", "two_shot", "island_dataflow")
    }
    assert crossed == {"one_shot": 16.0, "two_shot": 4.0, "island_dataflow": 1.0}


def test_int8_wire_sends_17_bytes_where_bf16_sends_32() -> None:
    lossless = describe("two_shot", world=8, rows=4, hidden=7168)
    int8 = describe("two_shot", world=8, rows=4, hidden=7168, wire="int8")
    ratio = sum(int8.egress) / sum(lossless.egress)
    # 256 codes + 8 scales + 8 spare bytes against 512; without the spare bytes it would be 0.516.
    assert ratio == pytest.approx(272 / 512)
    assert ratio <= 1.05 * 264 / 512


def test_worlds_above_8_keep_within_what_a_gpu_can_map() -> None:
    assert describe("island_dataflow", world=16, islands="0-7;8-15", rows=1, hidden=4096).peers == 8
    four_by_four = "0-3;4-7;8-11;12-15"
    assert (
        describe("island_dataflow", world=16, islands=four_by_four, rows=1, hidden=4096).peers == 6
    )
    assert describe("island_ring", world=16, islands=four_by_four, rows=1, hidden=4096).peers == 4
    assert describe("two_shot", world=16, rows=1, hidden=4096).peers == 15
