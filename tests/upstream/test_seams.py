"""The plugin on a SGLang with our pull requests merged: it registers where it used to patch.

Run by `make upstream`, which puts a patched tree in front of the installed SGLang and says which patches it has.
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
PATCHES = {name[:2] for name in os.environ.get("SM120_UPSTREAM_PATCHES", "").split(",") if name}

pytestmark = [
    pytest.mark.skipif(
        not TREE, reason="needs a patched SGLang; run `make upstream` (tools/upstream.py)"
    ),
    pytest.mark.skipif(
        not any(e.name == "sm120" for e in entry_points(group="sglang.srt.plugins")),
        reason="sglang-sm120 is not installed, so SGLang cannot find its entry point; run `make build`",
    ),
]
needs_all = pytest.mark.skipif(
    not {"03", "04", "05"} <= PATCHES, reason="this tree has the first two patches only"
)

# Target -> the patch that makes its hook unnecessary.
UNNECESSARY = {
    "add_cli_args": "01",
    "from_cli_args": "01",
    "attn_input_fusions": "02",
    "ffn_input_fusions": "02",
    "get_torch_distributed_pg_options": "04",
    "ncclCommInitRank": "04",
    "ncclCommInitRankConfig": "04",
    "AdaptiveController.__init__": "05",
    "AdaptiveController.init_states": "05",
}

CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}

# One interpreter answers all questions: importing SGLang is most of the time.
FACTS = (
    f"""
PATCHES = {sorted(PATCHES)}
"""
    + """
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
facts["findings"] = {f.target.path: (f.part, f.state) for f in contract.findings()}

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

if "03" in PATCHES:
    from sglang.srt.arg_groups.resolution_hooks import run_hook
    from sglang.srt.arg_groups.sm120_fusion_hook import handle_sm120_fusion
    six = ServerArgs(model_path="dummy", device="cpu", tp_size=6, enable_sm120_fusion=True)
    try:
        run_hook(handle_sm120_fusion, six)
    except ValueError as error:
        accepted = str(error)
    else:
        accepted = True
    facts["built_in"] = {"field": six.enable_sm120_fusion, "accepts_six_ranks": accepted}

shown = io.StringIO()
with contextlib.redirect_stdout(shown):
    serve(None, ["--model-type", "llm", "--help"])
facts["help"] = shown.getvalue()

from sglang.srt.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.layer_boundary.fusions import allreduce, registry
from sglang.srt.runtime_context import get_context, get_exec, get_spec
from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController
from sglang_sm120.hooks import fusion
from sglang_sm120.nccl.config import BULK_CTAS

ARGUMENTS = [ServerArgs.add_cli_args, ServerArgs.from_cli_args]
FUSIONS = [allreduce.attn_input_fusions, allreduce.ffn_input_fusions]
contract.install(contract.load_part("fusion"))
facts["first"] = registry.allreduce_fusion_providers()[0] is fusion.PROVIDER
facts["wrapped"] = [f.__qualname__ for f in ARGUMENTS + FUSIONS if hasattr(f, "__wrapped__")]
facts["patched"] = sorted(HookRegistry._patched)

if "04" in PATCHES:
    with get_context().override_server_args(
        tp_size=8, nccl_comm_config={"pp": {"max_ctas": 3}, "tp/graph": {"cga_cluster_size": 2}}
    ):
        contract.install(contract.load_part("nccl"))
        contract.install(contract.load_part("adaptive"))
        facts["nccl"] = get_exec().comm.nccl_comm_config
        facts["policy"] = get_spec().speculative_adaptive_policy
        parallel_state.set_nccl_comm_config(get_exec().comm.nccl_comm_config)
        made = parallel_state.get_torch_distributed_pg_options("tp")
        facts["torch_ctas"] = None if made is None else made.config.max_ctas
    facts["bulk"] = BULK_CTAS
    facts["late"] = [
        f.__qualname__
        for f in (
            parallel_state.get_torch_distributed_pg_options,
            NCCLLibrary.ncclCommInitRank,
            NCCLLibrary.ncclCommInitRankConfig,
            AdaptiveController.__init__,
            AdaptiveController.init_states,
        )
        if hasattr(f, "__wrapped__")
    ]
print(json.dumps(facts))
"""
)


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


def test_contract_report_shows_no_hook_where_sglang_has_a_seam(facts: dict[str, Any]) -> None:
    assert {"01", "02"} <= PATCHES
    states = {path: state for path, (_, state) in facts["findings"].items()}
    for ending, patch in UNNECESSARY.items():
        (path,) = [p for p in states if p.endswith(f".{ending}")]
        expected = {"seam"} if patch in PATCHES else {"ready", "hooked"}
        assert states[path] in expected, path
    # The other targets have no seam; they must be the ones that the hooks were written for.
    rest = {p: s for p, s in states.items() if not p.endswith(tuple(UNNECESSARY))}
    assert rest["sglang.srt.runtime_context.publish"] == "hooked"
    assert set(rest.values()) <= {"ready", "hooked"}


def test_installing_leaves_those_functions_alone(facts: dict[str, Any]) -> None:
    assert facts["first"] is True
    assert facts["wrapped"] == []
    assert facts["patched"] == ["sglang.srt.runtime_context.publish"]


@needs_all
def test_nccl_sizes_go_into_sglangs_own_option(facts: dict[str, Any]) -> None:
    assert facts["late"] == []
    sizes = facts["nccl"]
    assert sizes["pp"]["max_ctas"] == 3, "the user's own value"
    assert sizes["tp/graph"]["cga_cluster_size"] == 2
    assert sizes["tp/graph"]["max_ctas"] >= 1
    # Where no GPU is found, nothing speaks against PCIe.
    assert sizes["tp"]["max_ctas"] == facts["bulk"]
    assert facts["torch_ctas"] in (facts["bulk"], None)


@needs_all
def test_draft_lengths_are_left_to_sglangs_policy_by_cost(facts: dict[str, Any]) -> None:
    assert facts["policy"] == "cost_aware"


def test_flags_travel_in_plugin_args(facts: dict[str, Any]) -> None:
    assert facts["on"] == [True, "0,1;2,3", 900]
    assert facts["off"] == [False, "auto", 20_000]


def test_a_wrong_value_still_ends_the_launch_with_its_sentence(facts: dict[str, Any]) -> None:
    assert facts["refusal"].startswith("sglang-sm120: --sm120-timeout-ms must be from 50 to 600000")


def test_the_engine_takes_the_options_by_name(facts: dict[str, Any]) -> None:
    assert facts["engine"] == [True, "int8"]


def test_serve_help_shows_the_flags(facts: dict[str, Any]) -> None:
    assert "plugin sm120:" in facts["help"]
    assert "--sm120-backend" in facts["help"]
    # SGLang's own flag of that name, or ours; never both.
    assert facts["help"].count("\n  --enable-sm120-fusion") == 1


@needs_all
def test_sglangs_own_backend_stands_behind_ours(facts: dict[str, Any]) -> None:
    """Patch 3 has a backend for the same flag: the step that would refuse our worlds is ours, the sums are ours."""
    assert facts["built_in"] == {"field": True, "accepts_six_ranks": True}
