"""Ranks as processes of one GPU under MPS: slab exchange, mailboxes in pinned host memory, a killed rank."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_sm120.sim import shared_gpu

HERE = Path(__file__).parent


@pytest.fixture
def mps() -> Iterator[dict[str, str]]:
    if shutil.which(shared_gpu.MPS_CONTROL) is None:
        pytest.skip(f"{shared_gpu.MPS_CONTROL} is not on PATH: ranks on one GPU would take turns")
    with shared_gpu.mps() as environment:
        yield environment


def run(
    env: dict[str, str],
    world: int,
    ways: str,
    scenario: str,
    script: Path = HERE / "process_rank.py",
) -> list[tuple[int, str]]:
    """(exit code, output) of every rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world), str(port), ways, scenario],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    results = []
    for process in ranks:
        try:
            out, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        results.append((process.returncode, out))
    return results


@pytest.mark.parametrize("ways", ["vmm", "ipc", "vmm,ipc", "host"])
def test_processes_sum_over_every_way_of_sharing(mps: dict[str, str], ways: str) -> None:
    for code, out in run(mps, 2, ways, "sums"):
        assert code == 0 and "SUMS RIGHT" in out, out


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("form", ["relay_one_shot", "relay_two_shot"])
def test_processes_sum_through_the_relay(mps: dict[str, str], world: int, form: str) -> None:
    for code, out in run(mps, world, form, "sums"):
        assert code == 0 and "SUMS RIGHT over host" in out, out


def test_four_processes(mps: dict[str, str]) -> None:
    for code, out in run(mps, 4, "vmm,ipc", "sums"):
        assert code == 0 and "SUMS RIGHT" in out, out


@pytest.mark.parametrize("way", ["vmm,ipc", "relay_one_shot", "relay_two_shot"])
def test_a_killed_rank_is_named_within_the_bound(mps: dict[str, str], way: str) -> None:
    results = run(mps, 3, way, "kill")
    for rank in (0, 2):
        code, out = results[rank]
        assert (
            code == 0
            and "FAILED in 0." in out
            and "rank 1 is missing in all_reduce, 4 x 7168" in out
        ), out
