"""The probe's kernels on one GPU: virtual ranks are threads of one process, each with a slab and a stream."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from sglang_sm120.comm.slab import Slabs
from sglang_sm120.fabric import probe
from sglang_sm120.fabric.driver import edge_word, pattern
from sglang_sm120.fabric.gpu_driver import GpuDriver, head_bytes
from sglang_sm120.fabric.report import ProbeReport
from sglang_sm120.fabric.software import ThreadExchange, run_ranks

CAPACITY = 2 << 20


def virtual(world: int, effort: probe.Effort = probe.FAST) -> list[ProbeReport]:
    from sglang_sm120.comm.cuda_library import cuda_library

    library = cuda_library()
    nbytes = head_bytes(world) + world * CAPACITY
    memory = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(world)]
    torch.cuda.synchronize()
    meet = ThreadExchange(world)
    addresses = [m.data_ptr() for m in memory]

    def body(rank: int) -> ProbeReport:
        driver = GpuDriver(
            rank, world, library, 0, Slabs(list(addresses), nbytes, "virtual"), CAPACITY
        )
        return probe.run(driver, meet.of(rank), effort)

    return run_ranks(world, body)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_virtual_ranks_are_sound_and_fast(world: int) -> None:
    virtual(world)  # loads the kernels
    begin = time.monotonic()
    reports = virtual(world)
    taken = time.monotonic() - begin
    assert all(r == reports[0] for r in reports)
    report = reports[0]
    assert report.sound, report.failures
    assert not report.staged and 0 < report.median_latency_us() < 5
    assert all(
        gbps > 1 for a, row in enumerate(report.store_gbps) for b, gbps in enumerate(row) if a != b
    )
    assert taken < 3.0, report.steps
    print(
        f"\n{world} virtual ranks: {report.median_latency_us():.2f} us one way, {taken:.2f} s, {report.steps}"
    )


def test_full_mode_with_loads() -> None:
    effort = probe.Effort(loads=True, integrity_rounds=2)
    report = virtual(2, effort)[0]
    assert report.sound and report.load_gbps[0][1] > 1


@pytest.mark.parametrize("nbytes", [8, 16, 24, 4096, (128 << 10) + 24, CAPACITY])
def test_the_kernel_writes_the_pattern_and_nothing_else(nbytes: int) -> None:
    from sglang_sm120.comm.cuda_library import cuda_library

    library = cuda_library()
    memory = torch.full((CAPACITY + 64,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    edge = edge_word(2, 5, 99)
    library.probe_push(0, [memory.data_ptr()], [edge - (1 << 64) if edge >> 63 else edge], nbytes)
    found = memory.cpu().numpy()
    assert np.array_equal(found[:nbytes], pattern(2, 5, nbytes, 99))
    assert (found[nbytes:] == 7).all()
    assert bytes(library.probe_read(0, memory.data_ptr(), nbytes)) == found[:nbytes].tobytes()


def test_every_wait_is_bounded() -> None:
    from sglang_sm120.comm.cuda_library import cuda_library

    library = cuda_library()
    memory = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    at, bound = memory.data_ptr(), int(0.2e9)
    begin = time.monotonic()
    assert library.probe_arrived(0, at, 4096, bound) is False
    assert library.probe_ping(0, at, at + 128, 0, 8, bound) == -1
    assert library.probe_echo(0, at + 256, at + 384, 0, 8, bound) is False
    assert list(library.probe_stream(0, [at + 1024], 1024, [], [at + 512], 5, bound)) == [-1]
    assert time.monotonic() - begin < 2.0
    assert library.probe_fetch(0, at, 4096) > 0, "the context lives"
