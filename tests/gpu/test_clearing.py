"""After every call the two other slots are clear, whatever was called before: a stale lane would pass for data."""

from __future__ import annotations

import pytest
import torch
from rig import VirtualGroup, canonical_sum, inputs
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.native_how import How


def call(
    group: VirtualGroup, rows: int, hidden: int, dtype: torch.dtype, how: How, seed: int
) -> None:
    group.pin(Op.ALL_REDUCE, rows, how)
    parts, _, _ = inputs(group.world, rows, hidden, dtype, seed=seed)
    expected = canonical_sum(parts)
    assert all(torch.equal(out, expected) for out in group.sum(parts)), (rows, hidden, dtype, how)
    dirty = [group.dirty(rank) for rank in range(group.world)]
    assert not any(dirty), (rows, hidden, dtype, how, dirty)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["one_shot", "two_shot"])
def test_fp32_and_twice_as_many_16_bit_values_may_follow_each_other(
    world: int, schedule: str
) -> None:
    # As many bytes, but fp32 tiles are twice as long.
    with VirtualGroup(world, capacity_bytes=1 << 20) as group:
        for step in range(12):
            wide = step % 4 in (0, 3)
            rows, dtype = (4, torch.float32) if wide else (8, torch.bfloat16)
            call(group, rows, 1024, dtype, How(schedule), step)


@pytest.mark.parametrize("schedule", ["two_shot", "island_dataflow", "mailbox"])
def test_own_copies_of_rows_in_turn_are_cleared(schedule: str) -> None:
    in_turn, at_once = How(schedule, 1, 4, 1, 8), How(schedule, 1, 4, 1, 32)
    with VirtualGroup(4, capacity_bytes=1 << 20) as group:
        for step in range(12):
            how = in_turn if step % 5 in (0, 3) else at_once
            call(group, 32, 1024, torch.bfloat16, how, step)


@pytest.mark.parametrize("world", [2, 4])
def test_warps_without_a_row_clear_nothing_at_capacity(world: int) -> None:
    # 73 rows fill 1 MiB and are spread over 19 CTAs of four rows, of which three do not exist.
    how = How("one_shot" if world == 2 else "two_shot", 1, 7, 4, 19)
    with VirtualGroup(world, capacity_bytes=1 << 20) as group:
        for step in range(7):
            call(group, 73, 7168, torch.bfloat16, how, step)


def test_a_lane_left_behind_is_seen() -> None:
    # Negative control of this file: a stale contribution in the next slot gives a wrong sum, and counts as dirty.
    with VirtualGroup(2, capacity_bytes=1 << 20) as group:
        parts, _, _ = inputs(2, 1, 1024)
        expected = canonical_sum(parts)
        assert all(torch.equal(out, expected) for out in group.sum(parts))
        assert group.dirty(0) == 0
        # Call 1 polls rank 1's part of tile 0 in slot 1; one-shot, so it lies 512 bytes after rank 0's place.
        group.slots(0)[1, 512 : 512 + 16] = 0
        torch.cuda.synchronize()
        assert group.dirty(0) == 16

        def late(communicator, rank):  # type: ignore[no-untyped-def]
            if rank == 1:
                torch.cuda._sleep(
                    20_000_000
                )  # about 10 ms: rank 0 looks before the true part comes
            return communicator.all_reduce(parts[rank])

        got = group.each(late)
        assert got[0] is not None and got[1] is not None
        assert not torch.equal(got[0], expected) and torch.equal(got[1], expected)


def test_a_call_beyond_the_slab_is_refused_and_the_next_one_is_right() -> None:
    with VirtualGroup(2, capacity_bytes=1 << 20) as group:
        big, _, _ = inputs(2, 74, 7168)
        assert not group.ranks[0].admits(Op.ALL_REDUCE, 74, 7168, torch.bfloat16)
        for rank, communicator in enumerate(group.ranks):
            with pytest.raises(Exception, match="74 x 7168 does not fit the slab"):
                communicator.all_reduce(big[rank])
        parts, _, _ = inputs(2, 4, 7168)
        assert all(torch.equal(out, canonical_sum(parts)) for out in group.sum(parts))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("schedule", ["one_shot", "two_shot"])
def test_paced_pushes_of_mailboxes_leave_nothing_behind(world: int, schedule: str) -> None:
    # Above 64 KiB, with rows in turn: the next row is pushed before this one is read, after a look at one vector.
    with VirtualGroup(world, way="host") as group:
        for step, ctas in enumerate((8, 32, 8, 8, 32, 5)):
            call(group, 40, 2880, torch.bfloat16, How(schedule, 1, 12, 1, ctas), step)
            call(group, 2, 264, torch.bfloat16, How(schedule), step)
