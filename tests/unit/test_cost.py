"""The cost model: warm-up timings, interpolation, and what served passes teach it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.verify.cost import COLD, CostModel, StageTimes, load_table


def grid(comm_share: float = 0.5, steps=(0, 1, 3), batches=(1, 8)) -> list[StageTimes]:
    """Passes of 10 ms plus 4 ms per step, 1 ms of it draft-extend, doubled at batch 8."""
    out = []
    for s in steps:
        for b in batches:
            scale = 1.0 if b == 1 else 2.0
            total = scale * (10.0 + 4.0 * s)
            out.append(
                StageTimes(s, b, 1.0 * s * scale, total - (1.0 * s + 1.0) * scale, 1.0 * scale,
                           comm_ms=comm_share * total)
            )  # fmt: skip
    return out


def test_warm_up_is_the_first_prediction():
    table = CostModel(grid()).table
    assert table.pass_ms(3, 1) == pytest.approx(22.0)
    assert table.pass_ms(3, 8) == pytest.approx(44.0)


def test_a_plain_step_is_the_zero_step_pass_without_draft_extend():
    table = CostModel(grid()).table
    assert table.pass_ms(0, 1) == pytest.approx(10.0)
    assert table.pass_ms(COLD, 1) == pytest.approx(9.0)


def test_between_and_beyond_known_shapes():
    table = CostModel(grid()).table
    assert table.pass_ms(3, 4) == pytest.approx(22.0 + 22.0 * 3 / 7)
    assert table.pass_ms(2, 1) == pytest.approx(18.0), "never timed: between 1 and 3"
    assert table.pass_ms(3, 15) == pytest.approx(66.0), "continued by the slope"
    assert table.pass_ms(7, 1) == pytest.approx(38.0)


def test_served_passes_replace_warm_up():
    model = CostModel(grid())
    for _ in range(30):
        model.observe(3, 1, 33.0)
    assert model.table.pass_ms(3, 1) == pytest.approx(33.0, rel=0.03)


def test_a_slower_fabric_is_carried_to_cells_that_are_not_run():
    model = CostModel(grid(comm_share=0.5))
    for _ in range(20):
        model.observe(3, 1, 22.0)
    for _ in range(60):
        model.observe(3, 1, 33.0)  # the 11 ms of communication became 22
    table = model.table
    assert table.level == pytest.approx(2.0, rel=0.1)
    assert table.pass_ms(0, 1) == pytest.approx(5.0 + 10.0, rel=0.1)
    assert table.pass_ms(0, 1, optimistic=True) == pytest.approx(10.0, rel=0.02)


def test_one_visit_corrects_a_wrongly_carried_cell_without_moving_the_others():
    model = CostModel(grid(comm_share=0.0))
    for _ in range(40):
        model.observe(3, 1, 22.0)
    for _ in range(60):
        model.observe(3, 1, 44.0)
    carried = model.table.pass_ms(0, 1)
    assert carried == pytest.approx(20.0, rel=0.1)
    level = model.table.level
    for _ in range(4):
        model.observe(0, 1, 10.0)
    assert model.table.pass_ms(0, 1) < 13.0
    assert model.table.level == level
    assert model.table.pass_ms(3, 1) == pytest.approx(44.0, rel=0.05)


def test_prefills_and_pauses_between_passes_are_dropped():
    model = CostModel(grid())
    rng = random.Random(0)
    for i in range(300):
        model.observe(1, 1, 300.0 if i % 10 == 9 else 14.0 + rng.gauss(0, 0.3))
    assert model.table.pass_ms(1, 1) == pytest.approx(14.0, rel=0.03)
    assert model.rejected >= 28


def test_a_lasting_change_is_not_mistaken_for_outliers():
    model = CostModel(grid())
    for _ in range(50):
        model.observe(1, 1, 14.0)
    for _ in range(40):
        model.observe(1, 1, 50.0)
    assert model.table.pass_ms(1, 1) == pytest.approx(50.0, rel=0.05)


def test_a_shape_warm_up_never_timed_gets_its_own_cell():
    model = CostModel(grid())
    for _ in range(30):
        model.observe(5, 2, 40.0)
    assert model.table.pass_ms(5, 2) == pytest.approx(40.0, rel=0.05)
    assert model.table.seen(5, 2) == 30


def test_snapshot_round_trip_predicts_alike():
    model = CostModel(grid())
    for i in range(50):
        model.observe(3, 1, 20.0 + i * 0.1)
    copy = load_table(model.snapshot())
    for steps in (COLD, 0, 1, 2, 3, 7):
        for batch in (1, 3, 8, 20):
            assert copy.pass_ms(steps, batch) == model.table.pass_ms(steps, batch)
    assert len(model.snapshot()) < 2000


@pytest.mark.parametrize(
    "timings",
    [
        [],
        [StageTimes(1, 1, 0.0, 0.0, 0.0)],
        [StageTimes(1, 1, 0.0, 1.0, 0.0, comm_ms=2.0)],
        [StageTimes(1, 1, 0.0, 1.0, 0.0), StageTimes(1, 1, 0.0, 2.0, 0.0)],
    ],
)
def test_impossible_timings_are_refused(timings):
    with pytest.raises(ValueError):
        CostModel(timings)


def test_impossible_passes_are_refused():
    with pytest.raises(ValueError, match="took"):
        CostModel(grid()).observe(1, 1, 0.0)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([COLD, 0, 1, 3]), st.floats(0.5, 500.0)), max_size=80))
def test_predictions_stay_positive_and_finite(passes):
    model = CostModel(grid())
    for steps, ms in passes:
        model.observe(steps, 1, ms)
    for steps in (COLD, 0, 1, 2, 3, 9):
        for batch in (1, 5, 64):
            value = model.table.pass_ms(steps, batch)
            assert 0.0 < value < 1e7
            assert model.table.pass_ms(steps, batch, optimistic=True) <= value * (1 + 1e-9)
