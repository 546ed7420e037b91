"""The GPU driver's addresses and protocol, with a library whose "kernels" are Python over real host addresses."""

from __future__ import annotations

import ctypes
import itertools
import time
import zlib

import numpy as np
import pytest
from sglang_sm120.fabric import probe
from sglang_sm120.fabric.driver import NoAccess, edge_word, pattern
from sglang_sm120.fabric.gpu_driver import GpuDriver, head_bytes
from sglang_sm120.fabric.report import ProbeReport
from sglang_sm120.fabric.software import ThreadExchange, run_ranks

SLOW = probe.Effort(
    step_s=10.0,
    arrival_s=10.0,
    ping_rounds=2,
    stream_bytes=8 << 10,
    integrity_bytes=(4 << 10, (8 << 10) + 24),
    loads=True,
)
_MASK = 2**64 - 1


def words(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address))


def octets(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


class FakeLibrary:
    """What `csrc/ffi/probe.cpp` and the IPC part of `cuda.cpp` promise, on host memory of one process."""

    def __init__(self, refuse: str = "") -> None:
        self.kept: dict[int, np.ndarray] = {}
        self.refuse = refuse
        self.released = 0

    def slab_ipc_allocate(self, nbytes: int) -> int:
        memory = np.full(nbytes + 128, 0xAA, np.uint8)
        address = -(-memory.ctypes.data // 128) * 128
        self.kept[address] = memory
        return address

    def slab_ipc_handle(self, address: int) -> bytes:
        return address.to_bytes(8, "little")

    def slab_ipc_map(self, handle: bytes) -> int:
        if self.refuse:
            raise RuntimeError(self.refuse)
        return int.from_bytes(bytes(handle), "little")

    def slab_ipc_unmap(self, address: int) -> None: ...

    def slab_ipc_release(self, address: int) -> None:
        self.released += 1

    def probe_clear(self, device: int, address: int, nbytes: int) -> None:
        octets(address, nbytes)[:] = 0

    def probe_push(self, device: int, targets: list[int], edges: list[int], nbytes: int) -> None:
        for address, edge in zip(targets, edges, strict=True):
            # The kernel's own arithmetic, written out: word i is (m ^ m >> 29) ^ edge with m = (i + 1) * mix.
            for i in range(nbytes // 8):
                m = (i + 1) * 0x9E3779B97F4A7C15 & _MASK
                word = (m ^ (m >> 29)) ^ (edge & _MASK)
                octets(address + 8 * i, 8)[:] = np.frombuffer(word.to_bytes(8, "little"), np.uint8)

    def probe_arrived(self, device: int, address: int, nbytes: int, timeout_ns: int) -> bool:
        deadline = time.monotonic_ns() + timeout_ns
        view = octets(address, nbytes).view(np.uint64)
        while not (view != 0).all():
            if time.monotonic_ns() > deadline:
                return False
            time.sleep(0)
        return True

    def probe_read(self, device: int, address: int, nbytes: int) -> bytes:
        return octets(address, nbytes).tobytes()

    def _wait(self, address: int, value: int, timeout_ns: int) -> bool:
        deadline = time.monotonic_ns() + timeout_ns
        while words(address, 1)[0] != value:
            if time.monotonic_ns() > deadline:
                return False
            time.sleep(0)
        return True

    def probe_ping(self, device, there, back, base, rounds, timeout_ns) -> int:  # type: ignore[no-untyped-def]
        begin = time.monotonic_ns()
        for i in range(base + 1, base + rounds + 1):
            words(there, 1)[0] = i
            if not self._wait(back, i, timeout_ns):
                return -1
        return time.monotonic_ns() - begin

    def probe_echo(self, device, here, back, base, rounds, timeout_ns) -> bool:  # type: ignore[no-untyped-def]
        for i in range(base + 1, base + rounds + 1):
            if not self._wait(here, i, timeout_ns):
                return False
            words(back, 1)[0] = i
        return True

    def probe_stream(self, device, targets, nbytes, tell, hear, mark, timeout_ns) -> list[int]:  # type: ignore[no-untyped-def]
        for address in tell:
            words(address, 1)[0] = mark
        if not all(self._wait(a, mark, timeout_ns) for a in hear):
            return [-1] * len(targets)
        for address in targets:
            words(address, nbytes // 4)[:] = mark
        return [1000 + i for i in range(len(targets))]

    def probe_fetch(self, device: int, source: int, nbytes: int) -> int:
        return 500 + 0 * int(octets(source, nbytes)[0])


def run(world: int, library: FakeLibrary) -> list[ProbeReport]:
    meet = ThreadExchange(world)

    def body(rank: int) -> ProbeReport:
        driver = GpuDriver.join(
            rank, world, meet.of(rank), library=library, device=0, capacity=16 << 10, ways=("ipc",)
        )
        # Latency of Python threads says nothing about staging.
        driver.staged_us = 0.0
        return probe.run(driver, meet.of(rank), SLOW)

    return run_ranks(world, body)


@pytest.mark.parametrize("world", [2, 3])
def test_the_probe_runs_over_the_gpu_drivers_protocol(world: int) -> None:
    library = FakeLibrary()
    reports = run(world, library)
    assert all(r == reports[0] for r in reports)
    report = reports[0]
    assert report.sound and report.rig == "GPU stores" and not report.simulated
    assert report.store_gbps[0][1] == pytest.approx((8 << 10) / 1000)
    assert report.load_gbps[1][0] == pytest.approx((8 << 10) / 500)
    assert library.released == world, "every rank frees its slab"


def test_a_flipped_byte_in_device_memory_is_found() -> None:
    class Flipping(FakeLibrary):
        def probe_push(self, device, targets, edges, nbytes):  # type: ignore[no-untyped-def]
            super().probe_push(device, targets, edges, nbytes)
            if nbytes > 8 << 10:
                octets(targets[0] + 4095, 1)[0] ^= 1

    report = run(2, Flipping())[0]
    assert {f.kind for f in report.failures} == {"corrupt"}
    assert "first at offset 4095" in report.failures[0].detail


def test_c04_a_mapping_that_fails_declines_on_all_ranks_and_frees_everything() -> None:
    library = FakeLibrary(refuse="CUDA error 101: invalid device ordinal")
    meet = ThreadExchange(2)

    def body(rank: int) -> str:
        with pytest.raises(NoAccess, match="101") as error:
            GpuDriver.join(rank, 2, meet.of(rank), library=library, device=0, ways=("ipc",))
        return str(error.value)

    texts = run_ranks(2, body)
    assert texts[0] == texts[1] and library.released == 2


@pytest.mark.parametrize("world", [2, 8, 16])
def test_words_and_inboxes_never_overlap(world: int) -> None:
    class Slabs:
        addresses = [r << 32 for r in range(world)]

    driver = GpuDriver(0, world, None, 0, Slabs(), 4096)  # type: ignore[arg-type]
    for owner in range(world):
        taken = [driver._word(owner, w, line) for w in range(world) for line in range(3)]
        assert len(set(taken)) == len(taken)
        assert all(b - a >= 128 for a, b in itertools.pairwise(sorted(taken)))
        assert max(taken) + 128 <= (owner << 32) + head_bytes(world)
        boxes = [driver._inbox(owner, s) for s in range(world)]
        assert min(boxes) == (owner << 32) + head_bytes(world)
        assert all(b - a == 4096 for a, b in itertools.pairwise(boxes))


def test_marks_differ_between_repeats_and_agree_between_ranks() -> None:
    flows = ((0, 1), (1, 0))
    marks = [zlib.crc32(repr((flows, n)).encode()) | 1 for n in range(1, 50)]
    assert len(set(marks)) > 45 and 0 not in marks


def test_the_kernels_arithmetic_is_the_pattern() -> None:
    memory = np.zeros(4096, np.uint8)
    FakeLibrary().probe_push(0, [memory.ctypes.data], [edge_word(3, 5, 77)], 4096)
    assert np.array_equal(memory, pattern(3, 5, 4096, 77))
