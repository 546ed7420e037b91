"""What a failed call says when it fails inside the capture of a graph, and that a drained graph is no fast one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from sglang_sm120.comm import candidates, timing
from sglang_sm120.comm.communicator import CollectiveError, Communicator, Op


@contextlib.contextmanager
def capture_that_breaks(graph: object, stream: object) -> Iterator[None]:
    """As torch's: whatever was raised inside, the end of an invalid capture raises an error of its own."""
    try:
        yield
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture_that_breaks)


def test_a_call_that_fails_inside_a_capture_is_the_error_that_comes_out(no_gpu) -> None:
    def call() -> None:
        raise CollectiveError("tp, call 70, rank 2: rank 3 is missing in all_reduce")

    with pytest.raises(CollectiveError, match="rank 3 is missing"):
        timing._captured(call, None, contextlib.nullcontext)


def test_a_capture_that_fails_by_itself_says_so(no_gpu) -> None:
    with pytest.raises(RuntimeError, match="previous error during capture"):
        timing._captured(lambda: None, None, contextlib.nullcontext)


class Drained(Communicator):
    """Its calls end at once after the first failure, as kernels do that find the abort word."""

    backend = "native"

    def __init__(self) -> None:
        super().__init__("tp", 1, 2)
        self.calls_made = 0

    def ways(self, op: Op) -> list[tuple[str, int]]:
        return [("one_shot", 0)] if op is Op.ALL_REDUCE else []

    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        return True

    def choose(self, op: Op, rows: int, hidden: int, schedule: str, ctas: int = 0) -> None:
        pass

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls_made += 1
        return x

    def all_reduce_rmsnorm(self, x, residual, weight, eps, *, gemma=False):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def poll(self) -> None:
        if self.calls_made > timing.WARM_CALLS:
            raise CollectiveError("tp, call 4, rank 1: rank 0 is missing in all_reduce")

    def close(self) -> None:
        pass


def test_a_time_is_not_believed_where_a_call_failed_meanwhile() -> None:
    (one,) = candidates.candidates_of(
        {"native": Drained()}, 64, torch.bfloat16, torch.device("cpu"), None
    )
    assert one.time is not None
    with pytest.raises(CollectiveError, match="rank 0 is missing"):
        one.time(Op.ALL_REDUCE, 4)
    assert one.time(Op.ALL_REDUCE_RMSNORM, 4) == math.inf
