"""The plugin on a SGLang with our pull requests merged: it registers where it used to patch.

Run by `make upstream`, which puts the patched tree in front of the installed SGLang.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

TREE = os.environ.get("SM120_UPSTREAM_TREE", "")

pytestmark = [
    pytest.mark.skipif(
        not TREE, reason="needs a patched SGLang; run `make upstream` (tools/upstream.py)"
    ),
    pytest.mark.skipif(
        not any(e.name == "sm120" for e in entry_points(group="sglang.srt.plugins")),
        reason="sglang-sm120 is not installed, so SGLang cannot find its entry point; run `make build`",
    ),
]

CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}

# One interpreter answers all questions: importing SGLang is most of the time.
FACTS = """
import contextlib, io, json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang
from sglang.cli.serve import serve
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang_sm120.hooks import contract
from sglang_sm120.hooks.launch import options_of

facts = {"sglang": sglang.__file__}
facts["findings"] = {
    f.target.path.rsplit(".", 1)[1]: (f.part, f.state) for f in contract.findings()
}

def options(*argv):
    o = options_of(prepare_server_args(["--model-path", "dummy", *argv]))
    return [o.enabled, o.islands, o.timeout_ms]

facts["off"] = options()
facts["on"] = options(
    "--enable-sm120-fusion", "--sm120-islands", "0,1;2,3", "--sm120-timeout-ms", "900"
)
wrong = prepare_server_args(
    ["--model-path", "dummy", "--enable-sm120-fusion", "--sm120-timeout-ms", "1"]
)
try:
    wrong.resolve_once()
except SystemExit as error:
    facts["refusal"] = str(error)

engine = ServerArgs(
    model_path="dummy", device="cpu", plugin_args={"sm120_enabled": True, "sm120_wire": "int8"}
)
engine.resolve_once()
facts["engine"] = [options_of(engine).enabled, options_of(engine).wire]

shown = io.StringIO()
with contextlib.redirect_stdout(shown):
    serve(None, ["--model-type", "llm", "--help"])
facts["help"] = shown.getvalue()

from sglang.srt.layers.layer_boundary.fusions import allreduce, registry
from sglang_sm120.hooks import fusion
contract.install(contract.load_part("fusion"))
facts["first"] = registry.allreduce_fusion_providers()[0] is fusion.PROVIDER
facts["wrapped"] = [
    f.__name__
    for f in (
        allreduce.attn_input_fusions,
        allreduce.ffn_input_fusions,
        ServerArgs.add_cli_args,
        ServerArgs.from_cli_args,
    )
    if hasattr(f, "__wrapped__")
]
facts["patched"] = sorted(HookRegistry._patched)
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", FACTS],
        capture_output=True,
        text=True,
        timeout=900,
        # SGLang's own dependencies bring a plugin that patches add_cli_args.
        env={**CLEAN, "COLUMNS": "100", "SGLANG_PLUGINS": "sm120"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_this_is_the_patched_tree(facts: dict[str, Any]) -> None:
    assert Path(facts["sglang"]).is_relative_to(TREE)


def test_contract_report_shows_no_hook_for_arguments_and_fusion(facts: dict[str, Any]) -> None:
    found = facts["findings"]
    assert found["add_cli_args"] == ["launch", "seam"]
    assert found["from_cli_args"] == ["launch", "seam"]
    assert found["attn_input_fusions"] == ["fusion", "seam"]
    assert found["ffn_input_fusions"] == ["fusion", "seam"]
    assert found["publish"] == ["launch", "hooked"]
    # The other parts have no seam yet; their targets must be the ones that the hooks were written for.
    rest = {state for part, state in found.values() if part not in ("launch", "fusion")}
    assert rest <= {"ready", "hooked"}


def test_installing_leaves_those_functions_alone(facts: dict[str, Any]) -> None:
    assert facts["first"] is True
    assert facts["wrapped"] == []
    assert facts["patched"] == ["sglang.srt.runtime_context.publish"]


def test_flags_travel_in_plugin_args(facts: dict[str, Any]) -> None:
    assert facts["on"] == [True, "0,1;2,3", 900]
    assert facts["off"] == [False, "auto", 2000]


def test_a_wrong_value_still_ends_the_launch_with_its_sentence(facts: dict[str, Any]) -> None:
    assert facts["refusal"].startswith("sglang-sm120: --sm120-timeout-ms must be from 50 to 600000")


def test_the_engine_takes_the_options_by_name(facts: dict[str, Any]) -> None:
    assert facts["engine"] == [True, "int8"]


def test_serve_help_shows_the_flags(facts: dict[str, Any]) -> None:
    assert "plugin sm120:" in facts["help"]
    assert "--sm120-backend" in facts["help"]
    # SGLang's own flag of that name, or ours; never both.
    assert facts["help"].count("\n  --enable-sm120-fusion") == 1
