"""Adaptive speculation on a real server: lengths follow acceptance, tokens do not, and fusion stays on.

Rig: CPU server, TP 2, DeepSeek-style tiny model with its EAGLE-3 head. Acceptance and the times of passes follow a
script: a test plugin spoils drafts while a file says so and moves the clock that the policy reads, so the choices do
not depend on how busy this machine is. One prompt at a time: passes come in the same order in every run.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import NEW_TOKENS, Way, cases_of, settled_reports
from sglang_sm120.sim.models import Built
from sglang_sm120.sim.server import Generation, SimServer, eagle3_flags

pytest.importorskip("sglang")

SCRIPTED = Path(__file__).parent / "scripted"
# Rounds of all prompts: enough passes for the policy to notice, leave and come back.
ROUNDS = {"good": 1, "spoiled": 1, "good again": 2}
CANDIDATES = [0, 1, 3, 5]


@dataclass
class Phase:
    """One stretch of the script."""

    answers: list[list[Generation]] = field(default_factory=list)

    def accept_length(self, last: int = 1) -> float:
        """Mean tokens per pass over the last rounds."""
        found = [a.accept_length for answers in self.answers[-last:] for a in answers]
        return statistics.fmean(x for x in found if x is not None)

    def tokens(self) -> set[tuple[tuple[int, ...], ...]]:
        return {tuple(a.output_ids for a in answers) for answers in self.answers}


@dataclass
class Script:
    """What the adaptive server did."""

    model: Built
    phases: dict[str, Phase]
    log: str
    reports: list[dict[str, Any]]


def _plugin_folder(folder: Path) -> Path:
    """Install the test plugin for the server's processes only."""
    info = folder / "scripted_drafts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-drafts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nscripted = scripted_drafts:register\n"
    )
    (folder / "scripted_drafts.py").write_text((SCRIPTED / "scripted_drafts.py").read_text())
    return folder


@pytest.fixture(scope="module")
def script(built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    model = built("deepseek")
    folder = tmp_path_factory.mktemp("adaptive")
    control = folder / "control"
    control.write_text("leave")
    config = folder / "adaptive.json"
    config.write_text(json.dumps({"1": {"candidate_steps": CANDIDATES}}))
    stats = folder / "stats"
    flags = [
        *eagle3_flags(model.drafter),
        "--speculative-adaptive",
        "--speculative-adaptive-config",
        str(config),
        "--enable-sm120-fusion",
        "--sm120-stats",
        str(stats),
    ]
    plugins = folder / "plugins"
    plugins.mkdir()
    path = os.pathsep.join(
        filter(None, [str(_plugin_folder(plugins)), os.environ.get("PYTHONPATH")])
    )
    env = {"PYTHONPATH": path, "SM120_TEST_SCRIPT": str(control)}
    prompts = [case.prompt for case in cases_of(model)]
    phases: dict[str, Phase] = {}
    with SimServer(model.target, flags, env=env, log=folder / "server.log") as server:
        for name, rounds in ROUNDS.items():
            control.write_text("spoil" if name == "spoiled" else "leave")
            phase = phases[name] = Phase()
            for _ in range(rounds):
                phase.answers.append(server.generate(prompts, max_new_tokens=NEW_TOKENS))
        yield Script(model, phases, server.log_text(), settled_reports(stats))


def chosen_steps(log: str) -> list[int]:
    """Every length that the policy settled on, in order, from rank 0's log."""
    return [int(n) for n in re.findall(r"sglang-sm120: (\d) draft steps \(accept length", log)]


def test_steps_follow_acceptance(script):
    good, spoiled, again = (script.phases[name] for name in ROUNDS)
    settled = chosen_steps(script.log)
    # Best by the scripted times: 5 steps while drafts are good, none while every draft is wrong.
    stop = settled.index(0)
    assert 5 in settled[:stop], settled
    assert settled[-1] == 5, settled
    assert good.accept_length() > 2.5
    assert again.accept_length() > 2.5, "drafting came back"
    assert spoiled.accept_length() < 1.15, "spoiled drafts are never accepted"


def test_the_policy_is_ours_and_says_why(script):
    assert "draft lengths [0, 1, 3, 5] are chosen by measured cost and acceptance" in script.log
    assert "Adaptive spec params updated" not in script.log, "SGLang's own policy is not asked"


def test_tokens_are_those_of_the_plain_server(script, served):
    plain = served(Way("deepseek", eagle=False, fused=True))
    for phase in script.phases.values():
        assert phase.tokens() == {tuple(plain.one_by_one)}


def test_fusion_stays_on_at_every_length(script):
    first, second = script.reports
    assert first["sums"] == second["sums"] and first["passes"] == second["passes"]
    layers = script.model.layers
    for report in script.reports:
        verify = report["sums"]["verify"]
        passes = report["passes"]["verify"]
        assert verify["fused_attention_sum"] == layers * passes
        assert verify["fused_ffn_sum"] == (layers - 1) * passes
        assert not verify.get("gloo", 0)


def test_ranks_never_disagreed(script):
    assert "PolicyDivergence" not in script.log and "differs from rank 0" not in script.log
