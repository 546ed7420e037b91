"""Faults under the software fabric and a virtual clock: each ends within the bound, naming the right rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from protocol_oracle import canonical_sum
from protocol_rig import (
    DTYPES,
    LAYOUTS,
    World,
    islands_of,
    random_inputs,
    same_bits,
    schedules_for,
)
from sglang_sm120.comm._lib import host_library

BOUND = 10_000_000  # virtual ns
BASE = {"capacity": 1 << 17, "fabric": 1, "jitter_ns": 2000, "timeout_ns": BOUND}


@pytest.mark.parametrize("seen", [0, 1], ids=["silent", "death-seen"])
@pytest.mark.parametrize("steps", [0, 1, 3, 6, 10])
@pytest.mark.parametrize(("world", "layout"), [(2, ""), (4, "0,1;2,3"), (5, "0,1;2,3,4")])
def test_a_stopped_rank_is_named_by_everyone_who_fails(
    world: int, layout: str, steps: int, seen: int
) -> None:
    victim = world - 1
    x = random_inputs(world, 2, 520, "bf16", seed=1)
    expected = canonical_sum(x, islands_of(world, layout))
    for schedule in schedules_for(world):
        options = {"victim": victim, "victim_call": 2, "victim_steps": steps, "death_seen": seen}
        with World(world, layout, {**BASE, "seed": steps, **options}) as rig:
            results = [rig.add(x, schedule, ctas=2) for _ in range(5)]
            failures = rig.run()
            assert failures[victim] == "stopped"
            for rank in range(world - 1):
                assert f"rank {victim} missing in call " in failures[rank], (schedule, failures)
                assert "(all_reduce, 2 x 520)" in failures[rank]
                record = rig.flight(rank)
                assert record["valid"] and record["source"] == victim
                assert record["waited_ns"] <= BOUND * 1.05
                # Calls before the fault are right, and the failed one is NaN, never half a sum.
                for result in results[:2]:
                    assert same_bits(result.out[rank], expected)
                assert torch.isnan(results[record["call"]].out[rank]).all()


@pytest.mark.parametrize("schedule", ["one_shot", "two_shot", "island_two_hop", "island_dataflow"])
def test_a_lost_edge_names_its_source(schedule: str) -> None:
    x = random_inputs(4, 2, 1032, "bf16", seed=1)
    # Rank 1 writes to rank 0 in every schedule; from some store on, nothing arrives.
    for lose_after in (0, 1, 2):
        with World(4, "0,1;2,3", {**BASE, "seed": 3}, [(1, 0, 0, lose_after)]) as rig:
            for _ in range(4):
                rig.add(x, schedule)
            failures = rig.run()
        assert "rank 1 missing in call" in failures[0], failures
        assert all("missing in call" in text for text in failures)


def test_a_slow_edge_changes_nothing() -> None:
    x = random_inputs(4, 2, 520, "fp16", seed=1)
    expected = canonical_sum(x, islands_of(4, "0,1;2,3"))
    with World(4, "0,1;2,3", {**BASE, "seed": 3, "tear": 2}, [(1, 0, 300_000, 1 << 60)]) as rig:
        results = [rig.add(x, s) for s in schedules_for(4) for _ in range(3)]
        assert rig.run() == [""] * 4
    for result in results:
        assert all(same_bits(result.out[rank], expected) for rank in range(4))


@pytest.mark.parametrize("schedule", ["one_shot", "two_shot", "island_dataflow", "island_ring"])
def test_another_shape_is_a_mismatch_on_every_rank(schedule: str) -> None:
    x = random_inputs(4, 5, 264, "bf16", seed=2)
    with World(4, "0,1;2,3", {**BASE, "seed": 1}) as rig:
        rig.add(x, schedule, rows=[5, 4, 5, 5])
        failures = rig.run()
    for text in failures:
        assert "call mismatch in call 0" in text
        assert "4 x 264" in text and "5 x 264" in text


def test_a_late_rank_finishes_its_call_and_names_the_mismatch_of_the_next() -> None:
    x = random_inputs(4, 5, 264, "bf16", seed=2)
    expected = canonical_sum(x, islands_of(4, ""))
    # Rank 3 is still in call 0, for want of rank 2's part, when the others see the mismatch of call 1.
    with World(4, "", {**BASE, "seed": 1}, [(2, 3, 3_000_000, 1 << 60)]) as rig:
        first = rig.add(x, "one_shot")
        rig.add(x, "one_shot", rows=[5, 4, 5, 5])
        failures = rig.run()
    for rank, text in enumerate(failures):
        assert "call mismatch in call 1" in text
        assert "4 x 264" in text and "5 x 264" in text
        assert same_bits(first.out[rank], expected)


@st.composite
def calls(draw: st.DrawFn) -> dict:
    world = draw(st.sampled_from([w for w in LAYOUTS if w <= 12]))
    return {
        "world": world,
        "layout": draw(st.sampled_from(LAYOUTS[world])),
        "rows": draw(st.integers(1, 6)),
        "hidden": 8 * draw(st.integers(1, 130)),
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "schedule": draw(st.sampled_from(schedules_for(world))),
        "ctas": draw(st.integers(1, 4)),
        "fp32_partials": draw(st.booleans()),
        "tear": draw(st.sampled_from([0, 4, 8, 16])),
        "seed": draw(st.integers(0, 1 << 20)),
        "victim": draw(st.sampled_from([None, None, 0, world - 1])),
        "steps": draw(st.integers(0, 12)),
    }


def stopped_case(world: int, layout: str, schedule: str, **rest: int) -> dict:
    """A case of `calls` in which a rank that waits for the victim was once named instead of it."""
    fixed = {"dtype": "fp16", "fp32_partials": True, "tear": 0, "victim": world - 1}
    return {"world": world, "layout": layout, "schedule": schedule, **fixed, **rest}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls())
@example(
    stopped_case(3, "0;1;2", "island_ring", rows=3, hidden=80, ctas=1, tear=4, seed=554503, steps=9)
)
@example(
    stopped_case(6, "0-2;3-5", "mailbox", rows=4, hidden=64, ctas=2, tear=8, seed=488997, steps=8)
)
@example(
    stopped_case(
        5, "0,1;2,3,4", "island_dataflow", rows=2, hidden=440, ctas=2, seed=633788, steps=8
    )
)
def test_any_call_is_right_or_fails_with_the_right_name(case: dict) -> None:
    world, layout = case["world"], case["layout"]
    x = random_inputs(world, case["rows"], case["hidden"], case["dtype"], case["seed"], True)
    expected = canonical_sum(x, islands_of(world, layout), fp32_partials=case["fp32_partials"])
    options = {**BASE, "seed": case["seed"], "tear": case["tear"], "shuffle": 1}
    if case["victim"] is not None:
        options |= {"victim": case["victim"], "victim_call": 1, "victim_steps": case["steps"]}
    with World(world, layout, options) as rig:
        results = [
            rig.add(x, case["schedule"], ctas=case["ctas"], fp32_partials=case["fp32_partials"])
            for _ in range(4)
        ]
        failures = rig.run()
    if case["victim"] is None:
        assert failures == [""] * world
        for result in results:
            assert all(same_bits(result.out[rank], expected) for rank in range(world))
    for rank, text in enumerate(failures):
        assert same_bits(results[0].out[rank], expected)
        if text and rank != case["victim"]:
            assert f"rank {case['victim']} missing in call" in text


@st.composite
def lost_edges(draw: st.DrawFn) -> dict:
    world = draw(st.sampled_from([w for w in LAYOUTS if w <= 8]))
    source = draw(st.integers(0, world - 1))
    return {
        "layout": draw(st.sampled_from(LAYOUTS[world])),
        "edge": (source, draw(st.sampled_from([r for r in range(world) if r != source]))),
        "lose_after": draw(st.integers(0, 6)),
        "world": world,
        "rows": draw(st.integers(1, 2)),
        "hidden": 8 * draw(st.integers(1, 120)),
        "schedule": draw(st.sampled_from(schedules_for(world))),
        "ctas": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 1 << 20)),
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lost_edges())
def test_an_edge_that_goes_silent_is_blamed_on_its_source_by_everyone(case: dict) -> None:
    world, (source, target) = case["world"], case["edge"]
    x = random_inputs(world, case["rows"], case["hidden"], "bf16", case["seed"], True)
    edge = (source, target, 0, case["lose_after"])
    with World(world, case["layout"], {**BASE, "seed": case["seed"], "shuffle": 1}, [edge]) as rig:
        for _ in range(4):
            rig.add(x, case["schedule"], ctas=case["ctas"])
        failures = rig.run()
    for text in filter(None, failures):
        assert f"rank {source} missing in call" in text, failures


SOAK = {"capacity": 1 << 16, "fabric": 1, "jitter_ns": 3000, "longest_stall_ns": 200_000, "tear": 4}


@pytest.mark.parametrize(
    ("world", "layout"), [(2, ""), (3, "0,1;2"), (4, "0,1;2,3"), (6, "0,1;2,3;4,5")]
)
def test_thousands_of_calls_with_random_delays(world: int, layout: str) -> None:
    small = {**SOAK, "world": world, "seed": 7, "most_hidden": 264, "most_rows": 2}
    assert host_library().world_soak(small, layout, 1024, False) == 1024


@pytest.mark.soak
@pytest.mark.parametrize(("world", "layout"), [(2, ""), (3, "0,1;2"), (4, "0,1;2,3")])
def test_a_million_calls_with_random_delays(world: int, layout: str) -> None:
    count = 1_000_000 if world == 2 else 128_000
    small = {**SOAK, "world": world, "seed": 11, "most_hidden": 264, "most_rows": 2}
    assert host_library().world_soak(small, layout, count, False) >= count
