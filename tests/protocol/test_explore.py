"""The slot protocol, explored exhaustively: 3 ranks, 2 tiles, 5 calls, every schedule; and what breaks it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from sglang_sm120.comm._lib import host_library
from sglang_sm120.comm.schedule import SCHEDULES

CASES = [
    ("one_shot", ""),
    ("two_shot", ""),
    ("island_two_hop", "0,1;2"),
    ("island_dataflow", "0,1;2"),
    ("island_ring", "0;1;2"),
    ("mailbox", "0,1;2"),
]
VARIANTS = ("right", "two_slots", "no_clear", "clear_next", "host_epoch")


@dataclass(frozen=True)
class Exploration:
    states: int
    complete: bool
    violation: str
    trace: list[str]


def explore(schedule: str, layout: str, variant: str, calls: int = 5) -> Exploration:
    raw = [
        str(text)
        for text in host_library().explore_slots(
            3, layout, SCHEDULES.index(schedule), VARIANTS.index(variant), 2, calls
        )
    ]
    return Exploration(int(raw[0]), raw[3] == "1", raw[4], raw[5:])


@pytest.mark.parametrize(("schedule", "layout"), CASES)
def test_no_interleaving_loses_or_mixes_data(schedule: str, layout: str) -> None:
    result = explore(schedule, layout, "right")
    assert result.violation == "", result.trace
    assert result.complete
    # Fewer states than this would mean that the ranks were not really let loose.
    assert result.states > 10_000


@pytest.mark.parametrize(("schedule", "layout"), CASES)
@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_the_explorer_finds_the_fault_in_each_negative_control(
    schedule: str, layout: str, variant: str
) -> None:
    result = explore(schedule, layout, variant)
    expected = ("stale read",) if variant == "no_clear" else ("stale read", "torn read", "lost")
    assert result.violation.startswith(expected), result.violation
    assert result.trace and all(step.startswith("rank ") for step in result.trace)


def test_without_clearing_the_first_three_calls_still_hide_the_fault() -> None:
    # The three slots are fresh: a test of fewer than four calls would have passed.
    assert explore("two_shot", "", "no_clear", calls=3).violation == ""
    assert "data of call 0 taken for call 3" in explore("two_shot", "", "no_clear").violation
