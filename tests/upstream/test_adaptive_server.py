"""A real server on a SGLang with our pull requests merged: SGLang's own policy by cost chooses draft lengths.

Rig: CPU server, TP 2, Llama-style tiny model with its EAGLE-3 head. Run by `make upstream`.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

TREE = os.environ.get("SM120_UPSTREAM_TREE", "")
PATCHES = os.environ.get("SM120_UPSTREAM_PATCHES", "")

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        "05-" not in PATCHES, reason="needs a SGLang with the policy; run `make upstream`"
    ),
]

CANDIDATES = [0, 1, 3]
# Requests at a time; the policy first visits each candidate for a few passes.
ROUNDS, CLIENTS, TOKENS = 8, 4, 48


def test_a_server_drafts_by_cost_and_its_text_stays_the_known_one(tmp_path: Path) -> None:
    from sglang_sm120.sim import models
    from sglang_sm120.sim.server import SimServer, eagle3_flags

    model = models.build("llama")
    config = tmp_path / "adaptive.json"
    config.write_text(
        json.dumps({"cost_aware": {"sync_interval": 16}, "1": {"candidate_steps": CANDIDATES}})
    )
    flags = [
        *eagle3_flags(model.drafter),
        "--speculative-adaptive",
        "--speculative-adaptive-config",
        str(config),
        "--enable-sm120-fusion",
    ]
    cases = model.cases(CLIENTS, new=TOKENS)
    lengths = set()
    with SimServer(model.target, flags, log=tmp_path / "server.log") as server:
        for _ in range(ROUNDS):
            answers = server.generate(
                [case.prompt for case in cases], max_new_tokens=TOKENS, concurrency=CLIENTS
            )
            assert [a.text for a in answers] == [case.expected for case in cases]
            lengths |= {a.accept_length for a in answers}
        log = server.log_text()
    assert f"CostAwareSpecPolicy initialized: candidate_steps={CANDIDATES}" in log
    assert "are chosen by measured cost and acceptance" not in log, "our own policy stays away"
    # Lengths were really changed: by the calibration at least.
    assert len(re.findall(r"Switch adaptive", log)) >= 2
    assert len(lengths) > 1
