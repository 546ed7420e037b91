"""What the probe needs from a rig: one rank's stores into other ranks' memory, timed and bounded.

A rig (GPU kernels, the host engine over a software fabric, a fake in tests) implements `EdgeDriver` once per
rank. The probe calls the same steps on all ranks in the same order.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
import numpy as np

_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio


class EdgeTimeout(RuntimeError):
    """A step did not finish within its bound; the text names the edge and the step."""


class NoAccess(RuntimeError):
    """The ranks cannot reach each other's memory; raised on every rank alike, the text names the rank and the error."""


class Received(msgspec.Struct, frozen=True):
    """What was found in this rank's memory.

    Attributes:
        arrived: whether all bytes were there within the bound.
        crc: CRC-32 of the bytes.
        wrong: number of wrong bytes; first_wrong: offset of the first one, -1 if none.
    """

    arrived: bool
    crc: int = 0
    wrong: int = 0
    first_wrong: int = -1


class EdgeDriver(ABC):
    """One rank's access to the others' probe memory.

    Every rank owns an inbox of `capacity` bytes per source rank. At most eight peers are used in one call (CUDA maps
    no more), so a driver may map them as they come. Every call returns or raises within its
    `timeout_s`; a call that cannot keep that promise makes the rank unusable, and the probe says so.

    Attributes:
        rank, world: this rank and how many there are.
        rig: what moves the bytes, for titles ("fake", "host engine", "GPU stores").
        capacity: bytes of one inbox.
        simulated: whether the figures are computed rather than measured.
        need: what a failure vetoes (see `verdict.NEEDS`): "p2p" for stores into peers' device memory.
        staged_us: one-way latency above which this rig's traffic takes a detour through system memory; 0 where
            that says nothing (ranks that share memory anyway).
    """

    rank: int
    world: int
    rig: str
    capacity: int
    simulated: bool = False
    need: str = "p2p"
    staged_us: float = 5.0

    @abstractmethod
    def open(self, timeout_s: float) -> dict[int, str]:
        """Map the other ranks' inboxes; returns the error text of each peer that cannot be mapped."""

    @abstractmethod
    def clear(self) -> None:
        """Zero all of this rank's inboxes and make that visible before returning."""

    @abstractmethod
    def push(self, targets: Sequence[int], nbytes: int, seed: int, timeout_s: float) -> None:
        """Write `pattern(rank, target, nbytes, seed)` into each target's inbox with this rank's own stores.

        All targets at once, as the collective kernels do. EdgeTimeout when the stores cannot be issued.
        """

    @abstractmethod
    def collect(self, source: int, nbytes: int, seed: int, timeout_s: float) -> Received:
        """Wait for `source`'s pattern in this rank's inbox and compare it byte by byte."""

    @abstractmethod
    def ping(self, peer: int, rounds: int, timeout_s: float) -> float:
        """Half the median round trip of a small store to `peer` and back, in microseconds.

        `peer` calls `echo` with this rank meanwhile. EdgeTimeout when an answer is missing.
        """

    @abstractmethod
    def echo(self, peer: int, rounds: int, timeout_s: float) -> None:
        """Answer `peer`'s `ping`."""

    @abstractmethod
    def stream(
        self, flows: Sequence[tuple[int, int]], nbytes: int, timeout_s: float
    ) -> list[float]:
        """Store `nbytes` along every flow (source, target) that starts here, all at once; GB/s of each, in order.

        `flows` are those of all ranks in this step, so that the ranks that take part can start together; each of
        them calls this with the same list, the others do not.
        """

    @abstractmethod
    def fetch(self, source: int, nbytes: int, timeout_s: float) -> float:
        """Read `nbytes` of `source`'s inbox with this rank's own loads; GB/s."""

    @abstractmethod
    def close(self) -> None:
        """Unmap and free; may be called twice; needs no other rank."""


def pattern(source: int, target: int, nbytes: int, seed: int) -> np.ndarray:
    """The bytes that `source` writes to `target`: every 8-byte word depends on its address, edge and seed.

    word(i) = mix(i + 1) xor mix(seed, source, target), mix = multiplication by 2**64 / golden ratio, xor its
    own upper bits. A byte taken from another address, edge or round therefore shows as wrong.

    Returns:
        [nbytes] uint8.
    """
    words = np.arange(1, -(-nbytes // 8) + 1, dtype=np.uint64) * np.uint64(_MIX)
    words = (words ^ (words >> np.uint64(29))) ^ np.uint64(edge_word(source, target, seed))
    return words.view(np.uint8)[:nbytes]


def edge_word(source: int, target: int, seed: int) -> int:
    """The 64 bits that tell an edge and a round apart in the pattern."""
    return ((seed * 0x10001 + source * 257 + target + 1) * _MIX) & (2**64 - 1)


def compare(found: np.ndarray, source: int, target: int, seed: int) -> Received:
    """Compare received bytes with the pattern.

    Args:
        found: [nbytes] uint8.
    """
    expected = pattern(source, target, found.size, seed)
    wrong = np.flatnonzero(found != expected)
    return Received(
        arrived=True,
        crc=zlib.crc32(found.tobytes()),
        wrong=int(wrong.size),
        first_wrong=int(wrong[0]) if wrong.size else -1,
    )
