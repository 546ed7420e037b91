"""The probe's driver for ranks that are processes (or threads) of one machine: bytes in shared memory, real time.

It is the rig of the host backend and of CI. Its latency is that of Python's polling, so no staging is read from it.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_sm120.fabric.driver import (
    EdgeDriver,
    EdgeTimeout,
    NoAccess,
    Received,
    compare,
    pattern,
)

SHM = Path("/dev/shm")
# Words of the header that one rank keeps for each other rank.
ARRIVED, PING, PONG, READY, WORDS = 0, 1, 2, 3, 8
SPIN = 64  # looks before a waiting rank lets another process run


class HostDriver(EdgeDriver):
    """One rank's inboxes in a shared segment; build with `join`."""

    simulated = False
    need = "host"
    staged_us = 0.0

    def __init__(self, rank: int, world: int, memory: mmap.mmap, capacity: int) -> None:
        self.rank, self.world, self.capacity = rank, world, capacity
        self.rig = "host memory"
        self._memory = memory
        heads = world * world * WORDS
        self._head: Any = np.frombuffer(memory, np.int64, heads).reshape(world, world, WORDS)
        inboxes = np.frombuffer(memory, np.uint8, world * world * capacity, heads * 8)
        self._inbox: Any = inboxes.reshape(world, world, capacity)

    @classmethod
    def join(
        cls,
        rank: int,
        world: int,
        session: str,
        exchange: Callable[[Any], list[Any]],
        capacity: int = 2 << 20,
    ) -> HostDriver:
        """Map the group's segment; collective. Its name is gone when this returns, so nothing is left behind.

        Args:
            session: text shared by the ranks and unique on this machine.

        Raises:
            NoAccess: on every rank, when one of them cannot map the segment (other IPC namespace, full /dev/shm).
        """
        path = SHM / f"sm120-probe-{session}"
        size = world * world * (WORDS * 8 + capacity)
        problem: str | None = None
        if rank == 0:
            try:
                fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
                os.posix_fallocate(fd, 0, size)
                os.close(fd)
            except OSError as error:
                problem = str(error)
        exchange(None)
        memory = None
        try:
            fd = os.open(path, os.O_RDWR)
            memory = mmap.mmap(fd, size)
            os.close(fd)
        except (OSError, ValueError) as error:
            problem = problem or str(error)
        told = exchange(problem)
        if rank == 0:
            path.unlink(missing_ok=True)
        lost = [f"rank {r}: {text}" for r, text in enumerate(told) if text]
        if lost or memory is None:
            raise NoAccess(f"the ranks share no memory ({'; '.join(lost)})")
        return cls(rank, world, memory, capacity)

    def open(self, timeout_s: float) -> dict[int, str]:
        return {}  # mapped in `join`

    def clear(self) -> None:
        self._inbox[self.rank] = 0
        self._head[self.rank, :, ARRIVED] = 0

    def push(self, targets: Sequence[int], nbytes: int, seed: int, timeout_s: float) -> None:
        for target in targets:
            self._inbox[target, self.rank, :nbytes] = pattern(self.rank, target, nbytes, seed)
            # x86 and the GIL keep stores in order; the word says which message is complete.
            self._head[target, self.rank, ARRIVED] = _tag(nbytes, seed)

    def collect(self, source: int, nbytes: int, seed: int, timeout_s: float) -> Received:
        tag = _tag(nbytes, seed)
        if not self._wait_for((self.rank, source, ARRIVED), tag, timeout_s):
            return Received(arrived=False)
        return compare(self._inbox[self.rank, source, :nbytes].copy(), source, self.rank, seed)

    def ping(self, peer: int, rounds: int, timeout_s: float) -> float:
        deadline = time.monotonic() + timeout_s
        taken = []
        base = int(self._head[self.rank, peer, PONG])
        for i in range(base + 1, base + rounds + 1):
            begin = time.perf_counter_ns()
            self._head[peer, self.rank, PING] = i
            left = deadline - time.monotonic()
            if not self._wait_for((self.rank, peer, PONG), i, left):
                raise EdgeTimeout(f"rank {peer} did not answer within {timeout_s:.2f} s")
            taken.append(time.perf_counter_ns() - begin)
        return float(np.median(taken)) / 2e3

    def echo(self, peer: int, rounds: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        base = int(self._head[peer, self.rank, PONG])
        for i in range(base + 1, base + rounds + 1):
            left = deadline - time.monotonic()
            if not self._wait_for((self.rank, peer, PING), i, left):
                raise EdgeTimeout(f"rank {peer} did not call within {timeout_s:.2f} s")
            self._head[peer, self.rank, PONG] = i

    def stream(
        self, flows: Sequence[tuple[int, int]], nbytes: int, timeout_s: float
    ) -> list[float]:
        sources = {a for a, _ in flows}
        targets = [b for a, b in flows if a == self.rank]
        # Equal on the ranks of one pattern, different for the pattern before (a repeat starts unaligned).
        mark = hash(tuple(flows)) & 0x7FFFFFFFFFFFFFFF
        self._head[self.rank, self.rank, READY] = mark
        if not self._wait(lambda: all(self._head[s, s, READY] == mark for s in sources), timeout_s):
            raise EdgeTimeout(
                f"not all of ranks {sorted(sources)} started within {timeout_s:.2f} s"
            )
        data = np.full(nbytes, self.rank + 1, np.uint8)
        got = []
        for target in targets:
            begin = time.perf_counter_ns()
            self._inbox[target, self.rank, :nbytes] = data
            got.append(nbytes / max(1, time.perf_counter_ns() - begin))
        return got

    def fetch(self, source: int, nbytes: int, timeout_s: float) -> float:
        begin = time.perf_counter_ns()
        self._inbox[source, self.rank, :nbytes].copy()
        return nbytes / max(1, time.perf_counter_ns() - begin)

    def close(self) -> None:
        self._head = self._inbox = None

    def _wait_for(self, word: tuple[int, int, int], value: int, timeout_s: float) -> bool:
        return self._wait(lambda: self._head[word] == value, timeout_s)

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        looks = 0
        while not ready():
            looks += 1
            if looks % SPIN == 0:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0)
        return True


def _tag(nbytes: int, seed: int) -> int:
    return (seed << 32) | nbytes
