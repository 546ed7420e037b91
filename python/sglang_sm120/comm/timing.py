"""Time of one collective call on this rank, as serving sees it: in a CUDA graph on GPUs, called from Python on CPUs.

The number of calls is fixed, never a matter of time passed: a call is a collective, and ranks that made different
numbers of calls would wait for each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

WARM_CALLS = 3
CPU_CALLS = 9
GRAPH_CALLS = 16  # calls per graph: the launch of the graph is shared by them
GRAPH_REPLAYS = 5


Capture = Callable[[], AbstractContextManager[object]]


def call_us(
    call: Callable[[], object], device: torch.device, capture: Capture = nullcontext
) -> float:
    """Median microseconds of one call of `call`; every rank of the collective makes the same number of calls.

    Args:
        capture: entered around the capture of the graph, for a collective whose captured buffers must be registered.

    Raises:
        whatever `call` raises.
    """
    if device.type == "cuda":
        return _graph_us(call, device, capture)
    taken = []
    for i in range(WARM_CALLS + CPU_CALLS):
        begin = time.perf_counter_ns()
        call()
        if i >= WARM_CALLS:
            taken.append(time.perf_counter_ns() - begin)
    return statistics.median(taken) / 1e3


def _graph_us(call: Callable[[], object], device: torch.device, capture: Capture) -> float:
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_CALLS):
            call()
        graph = _captured(call, side, capture)
        taken = []
        for _ in range(GRAPH_REPLAYS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(side)
            graph.replay()
            end.record(side)
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3 / GRAPH_CALLS)
    torch.cuda.current_stream(device).wait_stream(side)
    return statistics.median(taken[1:])


def _captured(
    call: Callable[[], object], side: torch.cuda.Stream, capture: Capture
) -> torch.cuda.CUDAGraph:
    """A graph of the calls; what a call raises comes out, not what the broken capture says afterwards."""
    graph = torch.cuda.CUDAGraph()
    raised: list[Exception] = []
    try:
        with capture(), torch.cuda.graph(graph, stream=side):
            try:
                for _ in range(GRAPH_CALLS):
                    call()
            except Exception as error:
                raised.append(error)
    except Exception:
        if not raised:
            raise
    if raised:
        raise raised[0]
    return graph


def usable() -> bool:
    """Whether this process's GPU still works; an illegal access takes it away for good, other errors do not."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def inputs(
    rows: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, residual, weight) of a timed call: [rows, hidden], [rows, hidden], [hidden].

    Zeros, because a baseline that sums in place is called many times on one tensor.
    """
    x = torch.zeros(rows, hidden, dtype=dtype, device=device)
    return x, torch.zeros_like(x), torch.ones(hidden, dtype=dtype, device=device)
