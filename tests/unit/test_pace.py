"""A rank whose processor is slow is told from one that waits: by operators that touch no GPU."""

from __future__ import annotations

import random

import pytest
from rich.console import Console
from sglang_sm120.verify.pace import CHEAP, ENOUGH, paces, slow_ranks
from sglang_sm120.verify.profile import Profile
from sglang_sm120.verify.profile_report import _print_skew, as_data

# Medians of two ranks of a server on one H200, microseconds: the second rank's process ran slowly.
FAST = {"aten::view": 1.16, "aten::as_strided": 0.46, "aten::slice": 2.66, "aten::resolve_neg": 0.21}  # fmt: skip
LATE = {"aten::view": 1.99, "aten::as_strided": 0.78, "aten::slice": 4.20, "aten::resolve_neg": 0.37}  # fmt: skip


def events(medians: dict[str, float], count: int) -> list[dict[str, object]]:
    """`count` of each operator round its median, long outliers among them, and operators that do more."""
    noise = random.Random(1)
    found: list[dict[str, object]] = []
    for name, us in medians.items():
        found += [
            {"cat": "cpu_op", "name": name, "dur": us * noise.uniform(0.9, 1.1)}
            for _ in range(count)
        ]
        found += [{"cat": "cpu_op", "name": name, "dur": 900.0} for _ in range(count // 10)]
    found += [{"cat": "cpu_op", "name": "aten::copy_", "dur": 50.0}] * count
    found += [{"cat": "user_annotation", "name": "aten::view", "dur": 50.0}] * count * 3
    return found


def test_medians_of_cheap_operators_are_read_and_rare_ones_left_out() -> None:
    found = paces(events(FAST, 100))
    assert set(found) == set(FAST) < set(CHEAP)
    for name, us in FAST.items():
        assert found[name] == pytest.approx(us, rel=0.1)
    assert paces(events(FAST, ENOUGH // 2)) == {}


def test_the_slow_rank_is_named_with_the_operator_nearest_to_its_factor() -> None:
    (slow,) = slow_ranks({0: FAST, 1: LATE, 2: {op: us * 1.1 for op, us in FAST.items()}})
    assert (slow.rank, slow.fastest) == (1, 0)
    assert slow.times == pytest.approx(1.7, abs=0.02)
    text = slow.sentence()
    assert "Rank 1's processor was 1.7 times as slow as rank 0's" in text
    assert (
        f"({slow.operator} {LATE[slow.operator]:.2f} against {FAST[slow.operator]:.2f} us)" in text
    )


def test_ranks_alike_one_rank_and_traces_without_operators_say_nothing() -> None:
    assert slow_ranks({0: FAST, 1: {op: us * 1.2 for op, us in FAST.items()}}) == []
    assert slow_ranks({0: LATE}) == []
    assert slow_ranks({0: FAST, 1: {}}) == []
    assert slow_ranks({}) == []


def test_the_report_prints_it_and_has_it_as_data() -> None:
    profile = Profile({0: {}, 3: {}}, {}, 0.0, tuple(slow_ranks({0: FAST, 3: LATE})))
    console = Console(width=300, record=True)
    _print_skew(profile, console)
    assert "Rank 3's processor was 1.7 times as slow" in console.export_text()
    (data,) = as_data(profile, [])["slow_processors"]
    assert data["rank"] == 3 and data["times"] == pytest.approx(1.7, abs=0.02)
