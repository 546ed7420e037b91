"""The relay, explored exhaustively: 3 ranks, 2 rows, 5 calls, both forms; what breaks it; and who writes and reads what."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from sglang_sm120.comm._lib import host_library

FORMS = ("one_shot", "two_shot")
VARIANTS = (
    "right",
    "one_slot",
    "flag_first",
    "no_fence",
    "early_read",
    "bare_flag",
    "short_count",
)


@dataclass(frozen=True)
class Exploration:
    states: int
    complete: bool
    violation: str
    trace: list[str]


def explore(
    form: str, second: str, variant: str = "right", rows: int = 2, ctas: int = 1, calls: int = 5
) -> Exploration:
    raw = [
        str(text)
        for text in host_library().explore_relay(
            3, FORMS.index(form), FORMS.index(second), VARIANTS.index(variant), rows, ctas, calls
        )
    ]
    return Exploration(int(raw[0]), raw[3] == "1", raw[4], raw[5:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_no_interleaving_reads_anything_but_this_calls_data(form: str, second: str) -> None:
    # Rows in turn in one CTA, so that a row is written while another is awaited; then rows at once.
    result = explore(form, second)
    assert result.violation == "" and result.complete, result.trace
    assert result.states > 5_000
    at_once = explore(form, second, ctas=2, calls=3)
    assert at_once.violation == "" and at_once.complete, at_once.trace
    assert at_once.states > 50_000


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("flag_first", "stale read: data of no call taken for call 0"),
        ("no_fence", "torn read: lanes of call 0 and no call"),
        ("early_read", "stale read: data of no call taken for call 0"),
        # Calls 0 and 2 share a slot, and so do 0 and 4; call 2 has one row and leaves the flag of row 1 alone.
        ("bare_flag", "stale read: data of call 0 taken for call 2"),
        ("short_count", "stale read: data of call 0 taken for call 4"),
    ],
)
def test_the_explorer_finds_the_fault_in_each_negative_control(
    form: str, variant: str, expected: str
) -> None:
    result = explore(form, form, variant)
    assert result.violation.startswith(expected), result.violation
    assert result.trace and all(step.startswith("rank ") for step in result.trace)


@pytest.mark.parametrize(
    ("form", "second"),
    [("one_shot", "one_shot"), ("one_shot", "two_shot"), ("two_shot", "one_shot")],
)
def test_one_slot_is_not_enough_for_one_shot(form: str, second: str) -> None:
    assert "overwritten: data of call" in explore(form, second, "one_slot").violation


def test_two_shot_alone_would_do_with_one_slot() -> None:
    # A rank ends a call only after every peer has read all contributions; docs/protocol.md says so.
    result = explore("two_shot", "two_shot", "one_slot")
    assert result.violation == "" and result.complete


def share(form: str, world: int, rank: int, tiles: int) -> tuple[list[int], list[int], dict]:
    raw = list(host_library().relay_share(FORMS.index(form), world, rank, tiles))
    first = raw.index(-1)
    second = raw.index(-1, first + 1)
    collected = raw[second + 1 :]
    return raw[:first], raw[first + 1 : second], dict(zip(collected[::2], collected[1::2]))


@pytest.mark.parametrize("world", range(2, 17))
def test_every_tile_is_written_once_and_read_by_who_needs_it(world: int) -> None:
    for tiles in (1, 2, 3, 11, 28, 63, 64):
        shares = [share("two_shot", world, rank, tiles) for rank in range(world)]
        for rank, (sends, sums, collects) in enumerate(shares):
            # An outbox holds every tile once: as a contribution, or as the sum of its owner.
            assert sorted(sends + sums) == list(range(tiles))
            assert sums == list(range(rank, tiles, world))
            assert sorted(collects) == sorted(sends)
            assert all(tile in shares[owner][1] for tile, owner in collects.items())
        # (N - 1) contributions to each tile, N - 1 readers of each sum.
        assert sum(len(s[0]) for s in shares) == (world - 1) * tiles
        assert sum(len(s[2]) for s in shares) == (world - 1) * tiles
        everything = list(range(tiles))
        assert share("one_shot", world, world - 1, tiles) == (everything, everything, {})


@pytest.mark.parametrize(("dtype", "nbytes"), [(0, 4), (1, 2)])
@pytest.mark.parametrize("tiles", [1, 28])
def test_tiles_and_flags_of_a_full_capacity_lie_apart(dtype: int, nbytes: int, tiles: int) -> None:
    capacity = 1 << 20
    rows = capacity // (tiles * 256 * nbytes)
    data, slot, total, slots, *offsets = host_library().relay_layout(capacity, rows, tiles, dtype)
    assert data == capacity and total == slots * slot and slot % 128 == 0
    spans = []
    for row, contribution, result in zip(*[iter(offsets)] * 3):
        assert row % 128 == 0 and contribution % 8 == 0
        assert contribution // 32 == result // 32, "a row's flags share a sector"
        spans += [(row, tiles * 256 * nbytes), (contribution, 8), (result, 8)]
    spans.sort()
    assert all(a + length <= b for (a, length), (b, _) in zip(spans, spans[1:]))
    assert spans[-1][0] + spans[-1][1] <= total and len(spans) == slots * rows * 3
