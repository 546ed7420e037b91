"""A missing rank, another shape and another operation end within the bound, in one sentence, on every rank."""

from __future__ import annotations

import time

import pytest
import torch
from rig import VirtualGroup, canonical_sum, inputs
from sglang_sm120.comm.communicator import CollectiveError, Op
from sglang_sm120.comm.native_how import How


@pytest.mark.parametrize("schedule", ["one_shot", "two_shot"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_missing_rank_is_named_within_the_bound_and_the_group_recovers(
    world: int, schedule: str
) -> None:
    with VirtualGroup(world, timeout_ms=200) as group:
        group.pin(Op.ALL_REDUCE_RMSNORM, 4, How(schedule))
        parts, residual, weight = inputs(world, 4, 7168)
        call = lambda c, r: c.all_reduce_rmsnorm(parts[r], residual, weight, 1e-6)  # noqa: E731
        group.each(call)
        began = time.monotonic()
        got = group.each(call, skip=[1])
        assert time.monotonic() - began < 2.0
        assert got[0] is not None and got[0][0].isnan().any()
        texts = [c.describe_failure() for r, c in enumerate(group.ranks) if r != 1]
        assert any(
            "rank 1 is missing in all_reduce_rmsnorm, 4 x 7168 bfloat16" in text for text in texts
        )
        for rank, communicator in enumerate(group.ranks):
            if rank != 1:
                with pytest.raises(CollectiveError, match="rank 1"):
                    communicator.check()
        group.recover()
        for out in group.sum(parts):
            assert out is not None and torch.equal(out, canonical_sum(parts))


def test_another_shape_is_a_call_mismatch_with_both_shapes() -> None:
    with VirtualGroup(3, timeout_ms=200) as group:
        big, _, _ = inputs(3, 5, 7168)
        group.each(lambda c, r: c.all_reduce(big[r][:4] if r == 1 else big[r]))
        texts = [c.describe_failure() for c in group.ranks]
        assert "call mismatch" in texts[0] and "5 x 7168" in texts[0] and "4 x 7168" in texts[0]
        assert "call mismatch" in texts[1] and "5 x 7168" in texts[1] and "4 x 7168" in texts[1]
        assert all(c.failed for c in group.ranks)


def test_another_operation_with_the_same_bytes_is_a_call_mismatch() -> None:
    with VirtualGroup(2, timeout_ms=200) as group:
        parts, _, _ = inputs(2, 4, 1024)
        group.each(lambda c, r: c.all_reduce(parts[r].view(torch.float16) if r else parts[r]))
        for communicator in group.ranks:
            assert "call mismatch" in communicator.describe_failure()
            assert "float16" in communicator.describe_failure()


def test_a_late_rank_within_the_bound_is_no_failure() -> None:
    with VirtualGroup(2, timeout_ms=2000) as group:
        parts, _, _ = inputs(2, 4, 7168)

        def call(communicator, rank):  # type: ignore[no-untyped-def]
            if rank == 0:
                torch.cuda._sleep(200_000_000)  # about 0.1 s
            return communicator.all_reduce(parts[rank])

        for out in group.each(call):
            assert out is not None and torch.equal(out, canonical_sum(parts))
        assert not any(c.failed for c in group.ranks)
