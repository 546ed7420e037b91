"""The probe: what the machine does under the kernels' own traffic, found before anything depends on it.

SPMD: every rank of a group calls `run` with its own driver; ranks meet in `exchange` between steps, so all of
them hold the same report. Steps go from harmless to violent (one pair, one flow per rank, islands, everything at
once), and stop at the first kind of failure. Every step is bounded, and so is the whole.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from sglang_sm120.fabric import islands as isl
from sglang_sm120.fabric import patterns
from sglang_sm120.fabric.driver import EdgeDriver, EdgeTimeout
from sglang_sm120.fabric.report import (
    Failure,
    Flow,
    PatternResult,
    ProbeReport,
    collapse_ratio,
)

Exchange = Callable[[Any], list[Any]]
T = TypeVar("T")

KIB: Final = 1024
MIB: Final = 1024 * KIB
# How much later than its own bound a driver call may return before it counts as stuck.
GRACE_S: Final = 2.0


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much to measure. All ranks must use the same.

    Attributes:
        step_s: bound of one step on one rank.
        arrival_s: bound of waiting for the first, smallest messages.
        ping_rounds: round trips per latency sample.
        stream_bytes: bytes per flow of a bandwidth measurement.
        integrity_bytes: message sizes, ascending; the odd one catches tails.
        integrity_rounds: repetitions of every integrity pattern with a fresh seed.
        loads: whether bandwidth of loads is measured too.
    """

    step_s: float = 1.0
    arrival_s: float = 1.0
    ping_rounds: int = 32
    stream_bytes: int = 2 * MIB
    integrity_bytes: tuple[int, ...] = (4 * KIB, 64 * KIB, 128 * KIB + 24, 1 * MIB)
    integrity_rounds: int = 1
    loads: bool = False


FAST: Final = Effort()
FULL: Final = Effort(
    step_s=5.0,
    ping_rounds=256,
    stream_bytes=16 * MIB,
    integrity_bytes=(4 * KIB, 64 * KIB, 128 * KIB + 24, 1 * MIB, 8 * MIB),
    integrity_rounds=32,
    loads=True,
)


class _Stop(Exception):
    """Failures were found (on all ranks alike): later steps would measure a broken machine."""


class _Worker:
    """One daemon thread that runs driver calls: a call that hangs keeps it, and never keeps the process."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._serve, name="sm120-probe", daemon=True).start()

    def _serve(self) -> None:
        while (job := self.jobs.get()) is not None:
            future, call = job
            try:
                future.set_result(call())
            except BaseException as error:  # delivered to the waiting side
                future.set_exception(error)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self.jobs.put((future, call))
        return future

    def stop(self) -> None:
        self.jobs.put(None)


class _Run:
    """State of one probe on one rank."""

    def __init__(self, driver: EdgeDriver, exchange: Exchange, effort: Effort) -> None:
        self.driver = driver
        self.exchange = exchange
        self.effort = effort
        self.rank, self.world = driver.rank, driver.world
        self.failures: list[Failure] = []
        self.steps: dict[str, float] = {}
        self.worker = _Worker()
        self.stuck = False

    def bounded(self, bound_s: float, call: Callable[[], T]) -> T:
        """Run a driver call; EdgeTimeout if it fails or does not return within its bound and the grace."""
        if self.stuck:
            raise EdgeTimeout("an earlier step of this rank did not return")
        future = self.worker.submit(call)
        try:
            return future.result(bound_s + GRACE_S)
        except EdgeTimeout:
            raise
        except Exception as error:
            if isinstance(error, FutureTimeout) and not future.done():
                self.stuck = True
                text = f"a step did not return within {bound_s + GRACE_S:.1f} s"
                raise EdgeTimeout(text) from None
            # Any error must reach the other ranks as a failure, or they would wait for this one.
            raise EdgeTimeout(f"{type(error).__name__}: {error}") from error

    def meet(self, mine: list[Failure]) -> None:
        """Share the failures of a step; raise _Stop on every rank if there are any."""
        if self.stuck:
            mine = [*mine, _failure("stuck", self.rank, self.rank, "a driver call did not return")]
        told = self.exchange([msgspec.to_builtins(f) for f in mine])
        for theirs in told:
            for item in theirs:
                failure = msgspec.convert(item, Failure)
                if failure not in self.failures:
                    self.failures.append(failure)
        if self.failures:
            raise _Stop

    def open(self) -> None:
        bound = 4 * self.effort.step_s
        try:
            errors = self.bounded(bound, lambda: self.driver.open(bound))
        except EdgeTimeout as late:
            errors = {self.rank: str(late)}
        self.meet([_failure("open", self.rank, peer, text) for peer, text in errors.items()])

    def arrive(self) -> None:
        """Smallest messages, one flow per rank at a time: does anything arrive at all?"""
        for shift in range(1, self.world):
            self.deliver([shift], 4 * KIB, seed=shift, bound_s=self.effort.arrival_s)

    def integrity(self) -> None:
        """Sizes ascending; for each size one flow per rank, then everything at once."""
        seed = 1000
        for nbytes in self.effort.integrity_bytes:
            if nbytes > self.driver.capacity:
                continue
            for _ in range(self.effort.integrity_rounds):
                alone = [[s] for s in range(1, self.world)]
                for shifts in alone + patterns.crowds(self.world):
                    seed += 1
                    self.deliver(shifts, nbytes, seed, self.effort.step_s)

    def deliver(self, shifts: Sequence[int], nbytes: int, seed: int, bound_s: float) -> None:
        """Every rank r pushes to r + shift for all `shifts` at once; every receiver checks every byte."""
        mine: list[Failure] = []
        targets = [(self.rank + s) % self.world for s in shifts]
        try:
            self.bounded(bound_s, self.driver.clear)
        except EdgeTimeout as late:
            mine.append(_failure("stuck", self.rank, self.rank, f"clearing the inbox: {late}"))
        self.exchange(None)  # nobody pushes into an inbox that is being cleared
        try:
            self.bounded(bound_s, lambda: self.driver.push(targets, nbytes, seed, bound_s))
        except EdgeTimeout as late:
            mine.append(_failure("lost", self.rank, targets[0], f"stores were not issued: {late}"))
        deadline = time.monotonic() + bound_s
        for shift in shifts:
            source = (self.rank - shift) % self.world
            left = max(0.01, deadline - time.monotonic())
            try:
                got = self.bounded(left, partial(self.driver.collect, source, nbytes, seed, left))
            except EdgeTimeout as late:
                mine.append(_failure("lost", source, self.rank, str(late)))
                break
            if not got.arrived:
                detail = f"{nbytes} bytes did not arrive within {bound_s:.2f} s"
                mine.append(_failure("lost", source, self.rank, detail))
            elif got.wrong:
                detail = (
                    f"{got.wrong} of {nbytes} bytes wrong, first at offset {got.first_wrong} "
                    f"(CRC {got.crc:08x}, {len(shifts)} flows per GPU)"
                )
                mine.append(_failure("corrupt", source, self.rank, detail))
        self.meet(mine)

    def latency(self) -> tuple[tuple[float, ...], ...]:
        """Both directions of every pair; disjoint pairs run together, in world - 1 (or world) rounds."""
        row = [0.0] * self.world
        rounds, bound = self.effort.ping_rounds, self.effort.step_s
        for pairs in patterns.tournament(self.world):
            for turn in (0, 1):
                mine: list[Failure] = []
                self.exchange(None)
                for pair in pairs:
                    if self.rank not in pair:
                        continue
                    first, second = pair if turn == 0 else pair[::-1]
                    peer = second if self.rank == first else first
                    try:
                        if self.rank == first:
                            row[peer] = self.bounded(
                                bound, partial(self.driver.ping, peer, rounds, bound)
                            )
                        else:
                            self.bounded(bound, partial(self.driver.echo, peer, rounds, bound))
                    except EdgeTimeout as late:
                        mine.append(_failure("lost", self.rank, peer, f"ping: {late}"))
                self.meet(mine)
        return tuple(tuple(r) for r in self.exchange(row))

    def solo(self, loads: bool = False) -> tuple[tuple[float, ...], ...]:
        """Bandwidth of every edge alone: one flow on the whole machine at a time."""
        row = [0.0] * self.world
        nbytes = min(self.effort.stream_bytes, self.driver.capacity)
        for source in range(self.world):
            self.exchange(None)
            mine: list[Failure] = []
            for target in range(self.world) if source == self.rank else ():
                if target == source:
                    continue
                try:
                    row[target] = self._one(target, nbytes, loads)
                except EdgeTimeout as late:
                    mine.append(_failure("lost", source, target, f"bandwidth: {late}"))
                    break
            self.meet(mine)
        return tuple(tuple(r) for r in self.exchange(row))

    def _one(self, target: int, nbytes: int, loads: bool) -> float:
        bound = self.effort.step_s
        if loads:
            return self.bounded(bound, lambda: self.driver.fetch(target, nbytes, bound))
        flows = [(self.rank, target)]
        return self.bounded(bound, lambda: self.driver.stream(flows, nbytes, bound))[0]

    def pattern(
        self, name: str, partition: isl.Partition, flows: Sequence[Flow], solo: isl.Matrix
    ) -> PatternResult:
        """Run `flows` at once and compare with the single flows."""
        targets = [b for a, b in flows if a == self.rank]
        nbytes = min(self.effort.stream_bytes, self.driver.capacity)
        bound = 4 * self.effort.step_s
        mine: list[Failure] = []
        got: list[float] = [0.0] * len(targets)
        self.exchange(None)
        if targets:
            try:
                got = self.bounded(bound, lambda: self.driver.stream(flows, nbytes, bound))
            except EdgeTimeout as late:
                mine.append(_failure("lost", self.rank, targets[0], f"{name} pattern: {late}"))
        told = self.exchange(dict(zip(targets, got, strict=True)))
        self.meet(mine)
        gbps = tuple(told[a][b] for a, b in flows)
        ratio = min(
            collapse_ratio(flows, gbps, solo, g) for g in patterns.groups_of(name, partition)
        )
        return PatternResult(
            name=name, islands=partition, flows=tuple(flows), gbps=gbps, ratio=ratio
        )

    def timed(self, name: str, step: Callable[[], T]) -> T:
        """Run a step and note its seconds."""
        begin = time.monotonic()
        try:
            return step()
        finally:
            self.steps[name] = round(time.monotonic() - begin, 4)


def run(
    driver: EdgeDriver,
    exchange: Exchange,
    effort: Effort = FAST,
    hints: Sequence[isl.Partition] = (),
) -> ProbeReport:
    """Probe the group of `driver`; collective over `exchange`.

    Args:
        driver: this rank's access; closed before returning.
        exchange: gathers one object of every rank, in rank order, and is itself bounded.
        hints: partitions to try besides those that latencies show (switches by sysfs, the user's own); the same
            on every rank.

    Returns:
        The report, the same on every rank but for `seconds` and `steps` (rank 0's are shared).
    """
    begin = time.monotonic()
    state = _Run(driver, exchange, effort)
    latency: tuple[tuple[float, ...], ...] = ()
    solo: tuple[tuple[float, ...], ...] = ()
    loads: tuple[tuple[float, ...], ...] = ()
    found: list[PatternResult] = []
    try:
        state.timed("open", state.open)
        state.timed("arrival", state.arrive)
        latency = state.timed("latency", state.latency)
        partitions = isl.with_hints(isl.partitions(latency), hints)
        early = ProbeReport(
            rig=driver.rig,
            simulated=driver.simulated,
            world=driver.world,
            latency_us=latency,
            staged_us=driver.staged_us,
        )
        # Staged traffic is vetoed anyway; measuring and verifying it at host speed would take minutes.
        if not early.staged:
            solo = state.timed("bandwidth", state.solo)
            loads = state.timed("loads", lambda: state.solo(loads=True)) if effort.loads else ()
            state.timed("integrity", state.integrity)
            for name, grouping, flows in patterns.to_run(partitions):
                step = f"{name} {isl.text(grouping)}"
                found.append(state.timed(step, partial(state.pattern, name, grouping, flows, solo)))
    except _Stop:
        pass
    finally:
        if not state.stuck:
            driver.close()
        state.worker.stop()
    shared = exchange((time.monotonic() - begin, state.steps))[0]
    return ProbeReport(
        rig=driver.rig,
        simulated=driver.simulated,
        world=driver.world,
        latency_us=latency,
        store_gbps=solo,
        load_gbps=loads,
        patterns=tuple(found),
        failures=tuple(state.failures),
        need=driver.need,
        staged_us=driver.staged_us,
        seconds=round(shared[0], 3),
        steps=shared[1],
    )


def _failure(kind: str, source: int, target: int, detail: str) -> Failure:
    return Failure(kind=kind, source=source, target=target, detail=detail)
