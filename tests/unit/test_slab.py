"""Sharing slabs: with a driver that only keeps books, nothing is left behind when the exchange between ranks ends early."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sglang_sm120.comm import slab
from sglang_sm120.fabric.software import ThreadExchange, run_ranks

WORLD = 3


class Driver:
    """Stands in for the CUDA library: counts what is allocated and mapped."""

    def __init__(self) -> None:
        self.held = 0

    def slab_vmm_granularity(self) -> int:
        return 4096

    def slab_vmm_allocate(self, nbytes: int) -> tuple[int, int]:
        self.held += 1
        return 1 << 20, os.open("/dev/null", os.O_RDONLY)

    def slab_vmm_map(self, fd: int, nbytes: int) -> int:
        assert os.fstat(fd).st_rdev == os.stat("/dev/null").st_rdev
        self.held += 1
        return self.held << 20

    def slab_vmm_release(self, address: int, nbytes: int) -> None:
        self.held -= 1

    def slab_host_register(self, address: int, nbytes: int) -> int:
        self.held += 1
        return address

    def slab_host_unregister(self, address: int) -> None:
        self.held -= 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files and sockets go, empty at first."""
    real = tempfile.mkstemp
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        slab.tempfile, "mkstemp", lambda prefix, dir: real(prefix=prefix, dir=tmp_path)
    )
    return tmp_path


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("way", ["vmm", "host"])
def test_every_rank_maps_every_slab_and_leaves_no_name(folder: Path, way: str) -> None:
    meet = ThreadExchange(WORLD)
    drivers = [Driver() for _ in range(WORLD)]
    before = open_files()
    shared = run_ranks(
        WORLD, lambda r: slab.share(drivers[r], meet.of(r), r, WORLD, 5000, ways=(way,))
    )
    assert all(s.way == way and all(s.addresses) for s in shared)
    assert [d.held for d in drivers] == [WORLD] * WORLD
    assert not list(folder.iterdir())
    for each in shared:
        each.close()
    assert [d.held for d in drivers] == [0] * WORLD and open_files() == before


@pytest.mark.parametrize("way", ["vmm", "host"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_peer_that_dies_meanwhile_leaves_nothing_behind(
    folder: Path, way: str, after: int
) -> None:
    meet = ThreadExchange(WORLD, timeout_s=1.0)
    drivers = [Driver() for _ in range(WORLD)]
    before = open_files()

    def body(rank: int) -> str:
        exchange, calls = meet.of(rank), 0

        def until(told: Any) -> list[Any]:
            nonlocal calls
            calls += 1
            if rank == 1 and calls > after:
                raise ConnectionError("killed")
            return exchange(told)

        with pytest.raises((ConnectionError, RuntimeError)) as error:
            slab.share(drivers[rank], until, rank, WORLD, 5000, ways=(way,))
        return type(error.value).__name__

    assert run_ranks(WORLD, body)[1] == "ConnectionError"
    assert not list(folder.iterdir()) and open_files() == before
    assert [d.held for d in drivers] == [0] * WORLD


def test_a_small_shared_memory_folder_is_said_on_every_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(slab.os, "posix_fallocate", full)
    meet = ThreadExchange(WORLD)
    drivers = [Driver() for _ in range(WORLD)]
    before = open_files()

    def body(rank: int) -> str:
        with pytest.raises(slab.SlabError) as error:
            slab.share(drivers[rank], meet.of(rank), rank, WORLD, 5000, ways=("host",))
        return str(error.value)

    said = run_ranks(WORLD, body)
    assert len(set(said)) == 1 and "rank 2: OSError: [Errno 28] No space left" in said[0]
    assert [d.held for d in drivers] == [0] * WORLD
    assert not list(folder.iterdir()) and open_files() == before
