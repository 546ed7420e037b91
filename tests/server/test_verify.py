"""What the verify scheduler does beside draft lengths, on a real server: profile it live, and sample with packed results.

Rig: CPU server, TP 2, DeepSeek-style tiny model with its EAGLE-3 head; times say nothing about GPUs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import NEW_TOKENS, cases_of, settled_reports
from sglang_sm120.sim.models import Built
from sglang_sm120.sim.server import Generation, SimServer, eagle3_flags

pytest.importorskip("sglang")


@dataclass
class Session:
    """One server: profiled while it served greedily, then asked to sample."""

    model: Built
    profile: dict[str, Any]
    printed: str
    before: list[dict[str, Any]]
    after: list[dict[str, Any]]
    sampled: list[Generation]
    log: str


@pytest.fixture(scope="module")
def session(built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    model = built("deepseek")
    folder = tmp_path_factory.mktemp("verify")
    stats, out = folder / "stats", folder / "profile.json"
    flags = [*eagle3_flags(model.drafter), "--enable-sm120-fusion", "--sm120-stats", str(stats)]
    prompts = [case.prompt for case in cases_of(model)]
    with SimServer(model.target, flags, log=folder / "server.log") as server:
        done = subprocess.run(
            [sys.executable, "-m", "sglang_sm120.cli.main", "verify-profile", "--url", server.url,
             "--folder", str(folder / "traces"), "--steps", "12", "--rows", "4", "--hidden", "64",
             "--json", str(out), "--picture", str(folder / "pass.png")],
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        before = settled_reports(stats)
        sampled = server.generate(
            prompts, max_new_tokens=NEW_TOKENS, concurrency=len(prompts), temperature=0.9
        )
        yield Session(
            model, json.loads(out.read_text()), done.stdout, before, settled_reports(stats), sampled,
            server.log_text(),
        )  # fmt: skip


def test_a_running_server_is_profiled_pass_by_pass(session):
    # Two sums per layer, and the embedding's.
    sums = 2 * session.model.layers + 1
    for rank in ("0", "1"):
        verify = session.profile["ranks"][rank]["VERIFY"]
        assert verify["passes"] >= 10 and verify["all_reduces"] == sums
        assert 0 < verify["communication"] < verify["span"]
        assert [kind[0] for kind in verify["all_reduce_kinds"]] == ["sm120"]
    assert f"{sums} all-reduces each" in session.printed


def packed(reports: list[dict[str, Any]]) -> list[int]:
    """Per rank, sums that the communicator made and no layer asked for: the packed results."""
    counts = []
    for report in reports:
        asked = sum(kinds.get("plain", 0) for kinds in report["sums"].values())
        (calls,) = report["calls"].values()
        counts.append(calls.get("all_reduce", 0) - asked)
    return counts


def test_sampled_results_travel_in_one_sum_per_pass(session):
    passes = [
        a["passes"]["verify"] - b["passes"]["verify"] for a, b in zip(session.after, session.before)
    ]
    found = [a - b for a, b in zip(packed(session.after), packed(session.before))]
    assert passes[0] == passes[1] > 0
    assert found == passes, "one sum instead of three broadcasts in each sampled verify pass"
    assert all(len(answer.output_ids) == NEW_TOKENS for answer in session.sampled)
    assert "Scheduler hit an exception" not in session.log


def test_every_sum_stays_fused_while_sampling(session):
    for report in session.after:
        verify, passes = report["sums"]["verify"], report["passes"]["verify"]
        assert verify["fused_attention_sum"] == session.model.layers * passes
