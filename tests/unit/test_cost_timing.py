"""Clocks of passes, driven by events whose time the test sets."""

from __future__ import annotations

import pytest
from sglang_sm120.verify.timing import LIMIT, PassClock, WallEvent, time_replays


class Stream:
    """A device that runs behind the host: events finish when `now` reaches them."""

    def __init__(self) -> None:
        self.end = 0.0
        self.now = 0.0
        self.made = 0

    def run(self, ms: float) -> None:
        self.end += ms

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.at = float("nan")

    def record(self) -> None:
        self.at = self.stream.end

    def query(self) -> bool:
        return self.stream.now >= self.at

    def synchronize(self) -> None:
        self.stream.now = self.at

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "read before it was ready: the device would be awaited"
        return end.at - self.at


@pytest.fixture
def rig():
    stream, seen = Stream(), []
    clock = PassClock(stream.event, lambda *pass_: seen.append(pass_))
    return stream, clock, seen


def serve(stream: Stream, clock: PassClock, steps: int, ms: float) -> None:
    clock.begin()
    stream.run(ms)
    clock.end(steps, 4)


def test_a_pass_lasts_until_the_next_one_starts(rig):
    stream, clock, seen = rig
    serve(stream, clock, 3, 10.0)
    stream.run(2.0)
    serve(stream, clock, 1, 5.0)
    stream.now = 100.0
    clock.poll()
    assert seen == [(3, 4, 12.0)]


def test_nothing_is_read_before_the_device_is_there(rig):
    stream, clock, seen = rig
    serve(stream, clock, 3, 10.0)
    serve(stream, clock, 3, 10.0)
    clock.poll()
    assert seen == []
    stream.now = 10.0
    clock.poll()
    assert seen == [(3, 4, 10.0)]


def test_waiting_for_requests_is_not_cost(rig):
    stream, clock, seen = rig
    serve(stream, clock, 3, 10.0)
    stream.run(500.0)
    serve(stream, clock, 3, 10.0)
    stream.now = 1000.0
    clock.poll()
    assert seen == [(3, 4, 10.0)]


def test_a_prefill_ends_the_pass_before_it(rig):
    stream, clock, seen = rig
    serve(stream, clock, 3, 10.0)
    clock.begin()
    stream.run(8.0)
    clock.cancel()
    serve(stream, clock, 3, 11.0)
    stream.now = 1000.0
    clock.poll()
    assert seen == [(3, 4, 10.0)]


def test_events_are_reused_and_bounded(rig):
    stream, clock, seen = rig
    for _ in range(1000):
        serve(stream, clock, 2, 1.0)
        stream.now = stream.end
        clock.poll()
    assert stream.made <= 6
    assert len(seen) == 999 and clock.dropped == 0


def test_a_clock_nobody_polls_drops_the_oldest(rig):
    stream, clock, seen = rig
    for i in range(LIMIT + 10):
        serve(stream, clock, i, 1.0)
    assert clock.dropped == 10
    stream.now = stream.end
    clock.poll()
    assert seen[0][0] == 10
    assert stream.made <= 2 * LIMIT + 2


def test_wall_events_measure_the_host_clock():
    import time

    a, b = WallEvent(), WallEvent()
    a.record()
    time.sleep(0.01)
    b.record()
    assert a.query() and 9.0 < a.elapsed_time(b) < 200.0


def test_replays_are_timed_by_their_median():
    stream = Stream()
    spans = iter([50.0, 3.0, 9.0, 3.5, 4.0, 100.0])
    assert time_replays(lambda: stream.run(next(spans)), 5, stream.event) == 4.0
