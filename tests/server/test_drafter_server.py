"""`sglang-sm120 drafter` against real servers: a sound drafter, and one that takes its input with the wrong sign.

Rig: CPU server, simulated platform, TP 2, tiny trained Llama with its EAGLE-3 head.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from sglang_sm120.cli.drafter import app
from sglang_sm120.sim.models import Built, Family
from sglang_sm120.sim.server import SimServer, eagle3_flags
from typer.testing import CliRunner

PROMPTS = 4


def misaligned(model: Built, folder: Path) -> Path:
    """A copy of the drafter that takes the target's states with the wrong sign: sound headers, useless input."""
    shutil.copytree(model.drafter, folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(str(path))
        tensors["fc.weight"] = -tensors["fc.weight"]
        save_file(tensors, str(path), metadata={"format": "pt"})
    return folder


def run(*args: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, [*(str(a) for a in args), "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_a_trained_drafter_fits_its_own_target_and_not_the_other(
    built: Callable[[Family], Built], family: Family, tmp_path: Path
) -> None:
    """Both families have the same sizes and tokenizer: only the head's rows tell them apart."""
    model, other = built(family), built("deepseek" if family == "llama" else "llama")
    text = tmp_path / "text.txt"
    text.write_text(model.text)
    code, own = run("check", model.target, model.drafter, "--text", text)
    assert (code, {f["level"] for f in own["findings"]}) == (0, {"ok"}), own
    _, wrong = run("check", model.target, other.drafter)
    assert [f["level"] for f in wrong["findings"] if f["name"] == "head rows"] == ["warning"]


@pytest.mark.parametrize("aligned", [True, False])
def test_check_and_measure_tell_a_sound_drafter_from_a_misaligned_one(
    built: Callable[[Family], Built], tmp_path: Path, aligned: bool
) -> None:
    model = built("llama")
    drafter = Path(model.drafter) if aligned else misaligned(model, tmp_path / "wrong")
    code, checked = run("check", model.target, drafter)
    # Headers cannot show this fault: it is the measurement's to find.
    assert (code, checked["fits"]) == (0, True), checked

    prompts = tmp_path / "prompts.jsonl"
    cases = model.cases(PROMPTS, new=40)
    prompts.write_text(
        "\n".join(
            json.dumps({"prompt": case.prompt, "class": "odd" if i % 2 else "even"})
            for i, case in enumerate(cases)
        )
    )
    with SimServer(model.target, eagle3_flags(str(drafter)), log=tmp_path / "log") as server:
        code, measured = run(
            "measure", prompts, "--url", server.url, "--max-tokens", 40,
            "--target", model.target, "--draft", drafter,
        )  # fmt: skip
    assert code == 0
    groups = {g["group"]: g for g in measured["groups"]}
    assert list(groups) == ["even", "odd", "all"]
    everything = groups["all"]
    assert everything["prompts"] == PROMPTS
    positions = everything["positions"]
    # SGLang's histogram ends with the longest draft that was right.
    assert 1 <= len(positions) <= 3 and positions == sorted(positions, reverse=True)
    length = everything["tokens"] / everything["passes"]
    assert length == pytest.approx(1 + sum(positions), rel=0.1)
    assert measured["verdict"]["misaligned"] is (not aligned), measured
    assert (length > 2.5) is aligned
