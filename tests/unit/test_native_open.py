"""Opening a native group: what one rank's GPU or driver says is known to all before anything runs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_sm120.comm import slab
from sglang_sm120.comm.communicator import CollectiveError, Op
from sglang_sm120.comm.native import NativeCommunicator
from sglang_sm120.fabric.software import ThreadExchange, run_ranks

BIG = SimpleNamespace(uuid="big", multi_processor_count=188, major=12)
SMALL = SimpleNamespace(uuid="small", multi_processor_count=48, major=8)


class Library:
    """The CUDA library's part; `fails` is what the driver says on this rank."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.closed = 0

    def cuda_slab_bytes(self, *_: object) -> int:
        return 1 << 20

    def cuda_open(self, *_: object) -> int:
        if self.fails:
            raise RuntimeError(self.fails)
        return 1

    def cuda_set_crowded(self, handle: int, crowded: bool) -> None:
        self.crowded = crowded

    def cuda_close(self, handle: int) -> None:
        self.closed += 1


@pytest.fixture
def open_all(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open a group of ranks with these GPUs and libraries: per rank the communicator or its error."""
    here = threading.local()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: here.gpu)
    freed: list[int] = []

    def share(library: Any, exchange: Any, rank: int, world: int, nbytes: int, **_: Any) -> Any:
        return SimpleNamespace(way="vmm", addresses=[1] * world, close=lambda: freed.append(rank))

    monkeypatch.setattr(slab, "share", share)

    def opened(gpus: list[Any], libraries: list[Library]) -> tuple[list[Any], list[int]]:
        meet = ThreadExchange(len(gpus), timeout_s=5.0)

        def body(rank: int) -> Any:
            here.gpu = gpus[rank]
            try:
                return NativeCommunicator(
                    "tp", rank, len(gpus), meet.of(rank), library=libraries[rank]
                )
            except CollectiveError as error:
                return str(error)

        return run_ranks(len(gpus), body), sorted(freed)

    return opened


def test_gpus_of_two_kinds_offer_and_run_the_same_on_every_rank(open_all: Any) -> None:
    libraries = [Library(), Library()]
    (first, second), _ = open_all([BIG, SMALL], libraries)
    assert first.ways(Op.ALL_REDUCE) == second.ways(Op.ALL_REDUCE)
    assert max(ctas for _, ctas in first.ways(Op.ALL_REDUCE)) == 8, (
        "32 CTAs do not fit the small one"
    )
    for communicator in (first, second):
        communicator.choose(Op.ALL_REDUCE_RMSNORM, 1, 7168, "one_shot", 8)
    hows = {c.how(Op.ALL_REDUCE_RMSNORM, 1, 7168, 2) for c in (first, second)}
    assert len(hows) == 1 and hows.pop().cluster == 1, "the small one has no clusters"
    alike, _ = open_all([BIG, BIG], [Library(), Library()])
    assert {library.crowded for library in libraries} == {False}
    assert max(ctas for _, ctas in alike[0].ways(Op.ALL_REDUCE)) == 32


def test_a_channel_that_one_rank_cannot_open_is_an_error_on_all_and_leaves_nothing(
    open_all: Any,
) -> None:
    libraries = [Library(), Library("out of memory")]
    errors, freed = open_all([BIG, SMALL], libraries)
    assert errors == ["tp: a channel could not be opened (rank 1: out of memory)"] * 2
    assert set(freed) == {0, 1}
    assert [library.closed for library in libraries] == [1, 0]
