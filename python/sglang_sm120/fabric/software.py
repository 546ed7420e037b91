"""A software fabric: real bytes between threads, times computed from a described machine.

It stands in for a machine nobody here owns: `sglang-sm120 probe --machine FILE` and the tests run the very probe
that serves on GPUs over it. Its figures are simulated and say so.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from sglang_sm120.fabric.driver import EdgeDriver, EdgeTimeout, Received, compare, pattern
from sglang_sm120.fabric.flows import shares
from sglang_sm120.fabric.machine import Fault, Machine
from sglang_sm120.fabric.probe import Effort, run
from sglang_sm120.fabric.report import ProbeReport

T = TypeVar("T")
# Times are computed, so messages only need the sizes at which faults begin; ranks share this process's CPU.
LIGHT = Effort(
    step_s=10.0, stream_bytes=64 << 10, integrity_bytes=(4 << 10, 64 << 10, (128 << 10) + 24)
)


class ThreadExchange:
    """all_gather of objects between the threads of one process, bounded.

    A rank that does not come makes every waiting rank raise threading.BrokenBarrierError.
    """

    def __init__(self, world: int, timeout_s: float = 30.0) -> None:
        self._slots: list[Any] = [None] * world
        self._barrier = threading.Barrier(world, timeout=timeout_s)

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        """The exchange as `rank` calls it."""

        def exchange(mine: Any) -> list[Any]:
            self._slots[rank] = mine
            self._barrier.wait()
            told = list(self._slots)
            self._barrier.wait()  # nobody overwrites a slot that another still reads
            return told

        return exchange


def run_ranks(world: int, body: Callable[[int], T]) -> list[T]:
    """Run `body(rank)` in one thread per rank; results in rank order; the first exception is raised."""
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    threads = [threading.Thread(target=call, args=(r,), daemon=True) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class SoftwareFabric:
    """The memory and the clockwork that the drivers of all ranks share.

    Args:
        machine: what to imitate, faults included.
        noise: relative spread of every time, drawn per call (0.02 is 2 %).
        capacity: bytes of one inbox.
    """

    def __init__(
        self, machine: Machine, *, noise: float = 0.0, seed: int = 0, capacity: int = 2 << 20
    ) -> None:
        self.machine = machine
        self.capacity = capacity
        self.inbox = np.zeros((machine.world, machine.world, capacity), dtype=np.uint8)
        self.dirty = 0  # no inbox was written beyond this offset since it was cleared last
        self.arrived: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # (target, source) -> (seed, bytes)
        self.changed = threading.Condition()
        self._noise = noise
        self._random = random.Random(seed)

    def jitter(self, value: float) -> float:
        """`value` with the fabric's noise."""
        if not self._noise:
            return value
        with self.changed:
            return value * (1.0 + self._random.uniform(-self._noise, self._noise))

    def fault(self, kind: str, source: int, target: int, nbytes: int) -> Fault | None:
        """The first fault of a kind that hits a stored message."""
        a, b = self.machine.gpus[source].id, self.machine.gpus[target].id
        for f in self.machine.faults:
            if f.kind == kind and f.hits(a, b, nbytes, "store"):
                return f
        return None

    def driver(self, rank: int) -> SoftwareDriver:
        """The driver of one rank."""
        return SoftwareDriver(self, rank)


class SoftwareDriver(EdgeDriver):
    """One rank of a software fabric."""

    simulated = True

    def __init__(self, fabric: SoftwareFabric, rank: int) -> None:
        self.fabric = fabric
        self.rank = rank
        self.world = fabric.machine.world
        self.rig = f"software fabric of {fabric.machine.name}"
        self.capacity = fabric.capacity
        self.opened: set[int] = set()

    def open(self, timeout_s: float) -> dict[int, str]:
        box = self.fabric.machine
        errors: dict[int, str] = {}
        for peer in range(self.world):
            if peer == self.rank:
                continue
            broken = self.fabric.fault("ipc", self.rank, peer, 1)
            if broken:
                errors[peer] = f"CUDA error {broken.code} while opening the memory handle"
            elif not box.p2p(box.gpus[self.rank].id, box.gpus[peer].id):
                errors[peer] = "no peer access (cudaDeviceCanAccessPeer is 0)"
            else:
                self.opened.add(peer)
        return errors

    def clear(self) -> None:
        with self.fabric.changed:
            self.fabric.inbox[self.rank, :, : self.fabric.dirty] = 0
            for source in range(self.world):
                self.fabric.arrived.pop((self.rank, source), None)

    def push(self, targets: Sequence[int], nbytes: int, seed: int, timeout_s: float) -> None:
        for target in targets:
            if self.fabric.fault("drop", self.rank, target, nbytes):
                continue
            data = pattern(self.rank, target, nbytes, seed)
            flip = self.fabric.fault("flip", self.rank, target, nbytes)
            if flip:
                data = data.copy()
                data[flip.every - 1 :: flip.every] ^= 0x10
            with self.fabric.changed:
                self.fabric.inbox[target, self.rank, :nbytes] = data
                self.fabric.dirty = max(self.fabric.dirty, nbytes)
                self.fabric.arrived[target, self.rank] = (seed, nbytes)
                self.fabric.changed.notify_all()

    def collect(self, source: int, nbytes: int, seed: int, timeout_s: float) -> Received:
        key, wanted = (self.rank, source), (seed, nbytes)
        with self.fabric.changed:
            there = self.fabric.changed.wait_for(
                lambda: self.fabric.arrived.get(key) == wanted, timeout_s
            )
            if not there:
                return Received(arrived=False)
            found = self.fabric.inbox[self.rank, source, :nbytes].copy()
        return compare(found, source, self.rank, seed)

    def ping(self, peer: int, rounds: int, timeout_s: float) -> float:
        if self.fabric.fault("drop", self.rank, peer, 16) or self.fabric.fault(
            "drop", peer, self.rank, 16
        ):
            time.sleep(timeout_s)
            raise EdgeTimeout(f"GPU {peer} did not answer within {timeout_s:.2f} s")
        gpus = self.fabric.machine.gpus
        there = self.fabric.machine.latency_us(gpus[self.rank].id, gpus[peer].id)
        back = self.fabric.machine.latency_us(gpus[peer].id, gpus[self.rank].id)
        return self.fabric.jitter((there + back) / 2)

    def echo(self, peer: int, rounds: int, timeout_s: float) -> None:
        if self.fabric.fault("drop", peer, self.rank, 16):
            time.sleep(timeout_s)
            raise EdgeTimeout(f"GPU {peer} did not call within {timeout_s:.2f} s")

    def stream(
        self, flows: Sequence[tuple[int, int]], nbytes: int, timeout_s: float
    ) -> list[float]:
        got = shares(self.fabric.machine, flows, "store")
        return [
            self.fabric.jitter(g) for (a, _), g in zip(flows, got, strict=True) if a == self.rank
        ]

    def fetch(self, source: int, nbytes: int, timeout_s: float) -> float:
        return self.fabric.jitter(shares(self.fabric.machine, [(self.rank, source)], "load")[0])

    def close(self) -> None:
        self.opened.clear()


def probe_machine(
    machine: Machine, effort: Effort = LIGHT, *, noise: float = 0.0, seed: int = 0
) -> ProbeReport:
    """Run the probe on every rank of a described machine and return rank 0's report.

    The machine's own islands are the hint, as sysfs would give them.
    """
    fabric = SoftwareFabric(machine, noise=noise, seed=seed)
    meet = ThreadExchange(machine.world)
    return run_ranks(machine.world, lambda rank: run(fabric.driver(rank), meet.of(rank), effort))[0]
