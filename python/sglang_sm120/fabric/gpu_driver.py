"""The probe's driver for GPUs: the kernels' own stores and loads into memory that every rank has mapped."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_sm120.comm import slab
from sglang_sm120.fabric.driver import (
    EdgeDriver,
    EdgeTimeout,
    NoAccess,
    Received,
    compare,
    edge_word,
)

LINE = 128  # bytes between two words that different ranks write
PING, PONG, READY, LINES = 0, 1, 2, 3  # words that a rank keeps for each other rank
ROUNDS = (
    8  # ping-pong rounds per round asked for: the GPU's clock ticks once in up to a microsecond
)


class GpuDriver(EdgeDriver):
    """One rank's inboxes in a slab of its own; build with `join`."""

    rig = "GPU stores"

    def __init__(
        self, rank: int, world: int, library: Any, device: int, slabs: slab.Slabs, capacity: int
    ) -> None:
        self.rank, self.world, self.capacity = rank, world, capacity
        self._lib, self._device, self._slabs = library, device, slabs
        self._pings: dict[tuple[int, int], int] = {}
        self._streams: dict[tuple[tuple[int, int], ...], int] = {}

    @classmethod
    def join(
        cls,
        rank: int,
        world: int,
        exchange: Callable[[Any], list[Any]],
        *,
        library: Any,
        device: int,
        capacity: int = 2 << 20,
        ways: Sequence[str] = slab.PEER_WAYS,
    ) -> GpuDriver:
        """Allocate and map all ranks' probe memory; collective.

        Args:
            library: the CUDA library (`comm.cuda_library.cuda_library()`).
            device: CUDA index of this rank's GPU.
            capacity: bytes of one inbox, a multiple of 16.

        Raises:
            NoAccess: on every rank, when one of them cannot map another's memory.
        """
        nbytes = head_bytes(world) + world * capacity
        try:
            slabs = slab.share(library, exchange, rank, world, nbytes, ways=ways)
        except slab.SlabError as error:
            raise NoAccess(str(error)) from None
        driver = cls(rank, world, library, device, slabs, capacity)
        if slabs.way in slab.HOST_WAYS:
            # Mailboxes: the bytes cross host memory by intent.
            driver.rig, driver.need, driver.staged_us = (
                "GPU stores to mailboxes",
                "host-memory",
                0.0,
            )
        library.probe_clear(device, slabs.addresses[rank], nbytes)
        exchange(None)  # nobody stores before every slab is clear
        return driver

    def open(self, timeout_s: float) -> dict[int, str]:
        return {}  # mapped in `join`

    def clear(self) -> None:
        begin = self._slabs.addresses[self.rank] + head_bytes(self.world)
        self._lib.probe_clear(self._device, begin, self.world * self.capacity)

    def push(self, targets: Sequence[int], nbytes: int, seed: int, timeout_s: float) -> None:
        where = [self._inbox(t, self.rank) for t in targets]
        edges = [_signed(edge_word(self.rank, t, seed)) for t in targets]
        self._lib.probe_push(self._device, where, edges, nbytes)

    def collect(self, source: int, nbytes: int, seed: int, timeout_s: float) -> Received:
        where = self._inbox(self.rank, source)
        if not self._lib.probe_arrived(self._device, where, nbytes, int(timeout_s * 1e9)):
            return Received(arrived=False)
        data = np.frombuffer(bytes(self._lib.probe_read(self._device, where, nbytes)), np.uint8)
        return compare(data, source, self.rank, seed)

    def ping(self, peer: int, rounds: int, timeout_s: float) -> float:
        count = rounds * ROUNDS
        base = self._next(self.rank, peer, count)
        there, back = self._word(peer, self.rank, PING), self._word(self.rank, peer, PONG)
        bound = int(timeout_s * 1e9)
        taken = self._lib.probe_ping(self._device, there, back, base, count, bound)
        if taken < 0:
            raise EdgeTimeout(f"GPU {peer} did not answer within {timeout_s:.2f} s")
        return float(taken) / (count - 1) / 2e3

    def echo(self, peer: int, rounds: int, timeout_s: float) -> None:
        count = rounds * ROUNDS
        base = self._next(peer, self.rank, count)
        here, back = self._word(self.rank, peer, PING), self._word(peer, self.rank, PONG)
        if not self._lib.probe_echo(self._device, here, back, base, count, int(timeout_s * 1e9)):
            raise EdgeTimeout(f"GPU {peer} did not call within {timeout_s:.2f} s")

    def stream(
        self, flows: Sequence[tuple[int, int]], nbytes: int, timeout_s: float
    ) -> list[float]:
        key = tuple(flows)
        self._streams[key] = self._streams.get(key, 0) + 1
        # The same on all ranks that take part, and never one that stands there from an earlier pattern.
        mark = zlib.crc32(repr((key, self._streams[key])).encode()) | 1
        sources = sorted({a for a, _ in flows})
        others = [s for s in sources if s != self.rank]
        taken = self._lib.probe_stream(
            self._device,
            [self._inbox(b, self.rank) for a, b in flows if a == self.rank],
            nbytes,
            [self._word(o, self.rank, READY) for o in others],
            [self._word(self.rank, o, READY) for o in others],
            mark,
            int(timeout_s * 1e9),
        )
        if any(ns <= 0 for ns in taken):
            raise EdgeTimeout(f"not all of GPUs {sources} started within {timeout_s:.2f} s")
        return [nbytes / ns for ns in taken]

    def fetch(self, source: int, nbytes: int, timeout_s: float) -> float:
        taken = self._lib.probe_fetch(self._device, self._inbox(source, self.rank), nbytes)
        return nbytes / max(1, int(taken))

    def close(self) -> None:
        self._slabs.close()

    def _inbox(self, target: int, source: int) -> int:
        """Address, as this rank maps it, of `target`'s inbox for `source`."""
        return self._slabs.addresses[target] + head_bytes(self.world) + source * self.capacity

    def _word(self, owner: int, writer: int, line: int) -> int:
        """Address of a word in `owner`'s head that only `writer` stores to."""
        return self._slabs.addresses[owner] + (writer * LINES + line) * LINE

    def _next(self, pinger: int, echoer: int, count: int) -> int:
        """Where the counting of this pair's words stands; both sides ask for the same pairs in one order."""
        base = self._pings.get((pinger, echoer), 0)
        self._pings[pinger, echoer] = base + count
        return base


def head_bytes(world: int) -> int:
    """Bytes of the words before the inboxes, rounded up to a page."""
    return -(-world * LINES * LINE // 4096) * 4096


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
