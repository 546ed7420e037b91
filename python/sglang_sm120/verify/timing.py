"""Clocks for passes: events that are polled, never waited for, so that measuring adds no host sync."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

# Passes measured at once. The overlap schedule keeps two in flight; more means nobody polls.
LIMIT = 32
# A gap before the next pass longer than this share of the pass is waiting for requests, not cost.
GAP = 1.0


class Event(Protocol):
    """The part of `torch.cuda.Event` used here."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class WallEvent:
    """An event of the host's clock, for devices whose calls return when the work is done."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: WallEvent) -> float:
        """Milliseconds from this event to `end_event`."""
        return (end_event._at - self._at) * 1e3


def cuda_event() -> Event:
    """A CUDA event that can be timed, on the current stream when recorded."""
    import torch

    return torch.cuda.Event(enable_timing=True)


class PassClock:
    """Times passes as they are served.

    A pass lasts from its start to the start of the next one when that follows at once, so the seams
    between passes count; otherwise to its own end.

    Args:
        make_event: `cuda_event` or `WallEvent`.
        sink: receives (steps or COLD, batch, milliseconds) of each finished pass, in order.
    """

    def __init__(
        self, make_event: Callable[[], Event], sink: Callable[[int, int, float], None]
    ) -> None:
        self._make = make_event
        self._sink = sink
        self._spare: list[Event] = []
        self._open: Event | None = None
        # (shape, start, end, followed): `followed` is whether the next entry's start ends this pass.
        self._passes: deque[_Pass] = deque()
        self.dropped = 0

    def begin(self) -> None:
        """A forward call starts; whether it is a pass is known at its end."""
        self._open = self._event()
        self._open.record()

    def cancel(self) -> None:
        """The forward call was a prefill: what follows it does not touch the pass before it."""
        if self._open is not None:
            self._spare.append(self._open)
            self._open = None
        if self._passes:
            self._passes[-1].closed = True

    def end(self, steps: int, batch: int) -> None:
        """The forward call that began last was a pass of this shape."""
        if self._open is None:
            return
        if len(self._passes) >= LIMIT:
            old = self._passes.popleft()
            self._spare += [old.start, old.end]
            self.dropped += 1
        stop = self._event()
        stop.record()
        self._passes.append(_Pass(steps, batch, self._open, stop))
        self._open = None

    def poll(self) -> None:
        """Report passes that are over; returns at once."""
        while self._passes:
            current = self._passes[0]
            follower = self._passes[1] if len(self._passes) > 1 else None
            if follower is None and not current.closed:
                return
            last = current.end if follower is None or current.closed else follower.start
            if not (current.end.query() and last.query()):
                return
            own = current.start.elapsed_time(current.end)
            total = current.start.elapsed_time(last)
            self._passes.popleft()
            # The follower's start is still needed; ours are free.
            self._spare += [current.start, current.end]
            self._sink(current.steps, current.batch, total if total <= (1.0 + GAP) * own else own)

    def _event(self) -> Event:
        return self._spare.pop() if self._spare else self._make()


class _Pass:
    __slots__ = ("steps", "batch", "start", "end", "closed")

    def __init__(self, steps: int, batch: int, start: Event, end: Event) -> None:
        self.steps = steps
        self.batch = batch
        self.start = start
        self.end = end
        self.closed = False


def time_replays(
    replay: Callable[[], object], repeats: int, make_event: Callable[[], Any]
) -> float:
    """Median milliseconds of a call on the current stream. Waits for the device: warm-up only.

    Args:
        replay: the call, e.g. the replay of a captured graph; run once more to warm up.
        repeats: timed calls, the same on every rank since the call may contain collectives.
        make_event: `cuda_event`.
    """
    replay()
    marks = [make_event() for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        replay()
        mark.record()
    marks[-1].synchronize()
    spans = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
    return spans[len(spans) // 2]
