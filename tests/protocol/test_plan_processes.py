"""Probe, verdict, plan, dispatch and counters between real processes: the host engine against gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_sm120.comm._lib import host_library

RANK = Path(__file__).with_name("plan_rank.py")


def start(world: int, cache: Path, turn: int, **env: str) -> tuple[list[dict], str]:
    """Run `world` ranks that pin the host backend; their answers, and rank 0's log."""
    session = f"plan{os.getpid()}x{turn}"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(r), str(world), session, str(cache), "host"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        for r in range(world)
    ]
    try:
        done = [p.communicate(timeout=240) for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [0] * world, [err[-2000:] for _, err in done]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in done], done[0][1]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    host_library()  # fails with its own sentence when the C++ part was not built


def test_one_plan_serves_right_sums_is_counted_logged_and_kept(tmp_path: Path) -> None:
    # The switch is about peer-to-peer between GPUs: host memory needs none.
    answers, log = start(2, tmp_path, 1, NCCL_P2P_DISABLE="1")
    first = answers[0]
    assert all(a["digest"] == first["digest"] and a["entries"] == first["entries"] for a in answers)
    assert {rows for _, rows, _, _ in first["entries"]} == {1, 2, 4, 8}
    assert all(backend == "host" and us > 0 for _, _, backend, us in first["entries"])
    assert not first["prefill"]
    # Rank i adds 2**i: the result tells which ranks took part.
    assert all(a["sums"] == [3.0] * 3 and a["served"] == 3 for a in answers)
    assert first["digest"] in log and "measured now" in log and "operation" in log
    assert "path is off" not in log
    again, log = start(2, tmp_path, 2, NCCL_P2P_DISABLE="1")
    assert again[0]["digest"] == first["digest"] and "kept from an earlier start" in log
