"""Ranks as processes of one GPU under MPS: slab exchange, mailboxes in pinned host memory, a killed rank."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def mps(tmp_path: Path) -> Iterator[dict[str, str]]:
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("nvidia-cuda-mps-control is not on PATH: ranks on one GPU would take turns")
    env = dict(os.environ)
    for name in ("PIPE", "LOG"):
        (tmp_path / name).mkdir()
        env[f"CUDA_MPS_{name}_DIRECTORY"] = str(tmp_path / name)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True)
    time.sleep(1.0)
    yield env
    with contextlib.suppress(subprocess.SubprocessError):
        subprocess.run(
            ["nvidia-cuda-mps-control"], input=b"quit\n", env=env, timeout=10, check=False
        )


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


def test_four_processes(mps: dict[str, str]) -> None:
    for code, out in run(mps, 4, "vmm,ipc", "sums"):
        assert code == 0 and "SUMS RIGHT" in out, out


def test_a_killed_rank_is_named_within_the_bound(mps: dict[str, str]) -> None:
    results = run(mps, 3, "vmm,ipc", "kill")
    for rank in (0, 2):
        code, out = results[rank]
        assert (
            code == 0
            and "FAILED in 0." in out
            and "rank 1 is missing in all_reduce, 4 x 7168" in out
        ), out
