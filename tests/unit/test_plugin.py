"""The plugin in real SGLang processes: --help, parsing, refusals, and no trace of it when it is not wanted.

Each question is one fresh interpreter, because SGLang's registry is global and patched once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import sglang_sm120
from sglang_sm120.options import DECLARED

pytestmark = pytest.mark.skipif(
    not any(e.name == "sm120" for e in entry_points(group="sglang.srt.plugins")),
    reason="sglang-sm120 is not installed, so SGLang cannot find its entry point; run `make build`",
)

# One plugin more whose entry point does not resolve must not matter, and neither may the hash seed of a set in --help.
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}

# Loads the plugins as SGLang's launcher does, then runs the rest of the script.
PRELUDE = """
import json, logging, sys
logging.disable(logging.INFO)
from sglang.srt.plugins import load_plugins
"""

NO_PLUGIN = """
import importlib.metadata as metadata
everything = metadata.entry_points
def entry_points(**kw):
    return [e for e in everything(**kw) if e.name != "sm120"] if kw.get("group") == "sglang.srt.plugins" else everything(**kw)
metadata.entry_points = entry_points
"""

HELP = """
load_plugins()
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang serve")
ServerArgs.add_cli_args(parser)
print(parser.format_help())
"""


def python(script: str, *, before: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    code = before + PRELUDE + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**CLEAN, "PYTHONHASHSEED": "0", "COLUMNS": "100", **environ},
    )


def output(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


PARSE = """
load_plugins()
from sglang.srt.server_args import prepare_server_args
import pickle
args = prepare_server_args(["--model-path", "dummy", *ARGV])
copy = pickle.loads(pickle.dumps(args))
from sglang_sm120.hooks.launch import options_of
import msgspec, os
from sglang.srt.plugins.hook_registry import HookRegistry
ours = [t for t, hooks in HookRegistry._hooks.items() for _, _, s in hooks if s and s.plugin_name == "sm120"]
deep = ("sglang.srt.layers", "sglang_sm120.comm", "sglang_sm120.sim.net")
print(json.dumps({
    "launcher": msgspec.to_builtins(options_of(args)),
    "worker": msgspec.to_builtins(options_of(copy)),
    "variable": os.environ.get("SGLANG_SM120_CONFIG"),
    "hooked": sorted(ours),
    "patched": sorted(HookRegistry._patched),
    "deep": [m for m in sys.modules if m.startswith(deep)],
}))
"""

CONFIG = "/tmp/sm120-test-config-{pid}.yaml"


@pytest.fixture(scope="module")
def runs() -> dict[str, subprocess.CompletedProcess[str]]:
    """Every fresh interpreter of this file, two at a time."""
    config = Path(CONFIG.format(pid=os.getpid()))
    config.write_text("enable-sm120-fusion: true\nsm120-backend: host\nsm120-timeout-ms: 700\n")
    wanted = {
        "help": lambda: python(HELP),
        "help with an empty plugin list": lambda: python(HELP, SGLANG_PLUGINS=""),
        "help without the entry point": lambda: python(HELP, before=NO_PLUGIN),
        "parse nothing": lambda: python(PARSE.replace("ARGV", "[]")),
        "parse flags": lambda: python(
            PARSE.replace("ARGV", '["--enable-sm120-fusion", "--sm120-islands", "0;1"]'),
            SGLANG_SM120_TIMEOUT_MS="900",
        ),
        "parse a config file": lambda: python(PARSE.replace("ARGV", f'["--config", "{config}"]')),
        "wrong flag": lambda: python(PARSE.replace("ARGV", '["--sm120-wire", "fp4"]')),
        "wrong variable": lambda: python(PARSE.replace("ARGV", "[]"), SGLANG_SM120_WIRE="fp4"),
        "resolution": lambda: python(RESOLVE),
        "changed release, asked for": lambda: python(CHANGED, SGLANG_SM120_ENABLE="1"),
        "changed release, not asked for": lambda: python(CHANGED),
    }
    with ThreadPoolExecutor(2) as pool:
        done = dict(zip(wanted, pool.map(lambda ask: ask(), wanted.values())))
    config.unlink()
    return done


# Engine(...) has no command line: options come from the environment and are checked when arguments are resolved.
RESOLVE = """
load_plugins()
from sglang_sm120 import options
from sglang_sm120.hooks import contract, launch
from sglang.srt.server_args import ServerArgs
seen = {}
def attempt(name, **kw):
    args = ServerArgs(model_path="dummy", **kw)
    try:
        launch.check_contract(args, lambda a: None)
        launch.check_server(args, lambda a: None)
        seen[name] = launch.options_of(args).backend
    except Exception as error:
        seen[name] = f"{type(error).__name__}: {error}"
attempt("off")
options.enable(backend="host", islands="0;1")
attempt("fits", device="cpu", tp_size=2)
attempt("islands", device="cpu", tp_size=4)
args = ServerArgs(model_path="dummy", device="cpu", tp_size=2, disable_custom_all_reduce=True)
args._raw_input = {"disable_custom_all_reduce": True}
try:
    launch.check_server(args, lambda a: None)
except Exception as error:
    seen["contradiction"] = str(error)
contract.PARTS["fusion"] = "sglang_sm120.hooks.of_another_release"
attempt("changed", device="cpu", tp_size=2)
import os
os.environ["SGLANG_SM120_TIMEOUT_MS"] = "soon"
os.environ.pop("SGLANG_SM120_CONFIG")
attempt("wrong variable", device="cpu", tp_size=2)
print(json.dumps(seen))
"""

CHANGED = """
import sglang.srt.runtime_context as context
def publish(server_args, role):
    pass
context.publish = publish
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
print(json.dumps(sorted(t for t, h in HookRegistry._hooks.items() for _, _, s in h if s and s.plugin_name == "sm120")))
"""


def test_help_shows_every_flag_in_a_group_of_its_own(runs):
    text = output(runs["help"])
    group = text[text.index("SM120 fusion:") :]
    for item in DECLARED:
        assert item.option.flag in group


@pytest.mark.parametrize("how", ["help with an empty plugin list", "help without the entry point"])
def test_help_is_untouched_without_the_plugin(runs, how):
    text, ours = output(runs[how]), output(runs["help"])
    assert "--sm120" not in text and "SM120 fusion" not in text
    # Taking our group and our flags out of the usage leaves SGLang's help, word for word.
    other = "help without the entry point" if "empty" in how else "help with an empty plugin list"
    assert text == output(runs[other])
    before_group = ours[: ours.index("SM120 fusion:")]
    body = before_group[before_group.index("\noptions:") :].strip()
    assert body in text and text.strip().endswith(body)


def test_nothing_given_means_off_everywhere(runs):
    seen = json.loads(output(runs["parse nothing"]))
    assert not seen["launcher"]["enabled"] and seen["launcher"] == seen["worker"]
    assert seen["variable"] is None


def test_flags_and_variables_reach_the_pickled_copy_and_the_children_s_environment(runs):
    seen = json.loads(output(runs["parse flags"]))
    launcher = seen["launcher"]
    assert launcher == seen["worker"] == json.loads(seen["variable"])
    assert (launcher["enabled"], launcher["islands"], launcher["timeout_ms"]) == (True, "0;1", 900)


def test_flags_in_a_config_file(runs):
    seen = json.loads(output(runs["parse a config file"]))
    launcher = seen["launcher"]
    assert (launcher["enabled"], launcher["backend"], launcher["timeout_ms"]) == (True, "host", 700)
    assert launcher == seen["worker"]


@pytest.mark.parametrize(
    "case, start", [("wrong flag", "--sm120-wire"), ("wrong variable", "SGLANG_SM120_WIRE")]
)
def test_wrong_value_ends_the_launch_with_one_sentence(runs, case, start):
    result = runs[case]
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if "sglang-sm120" in line]
    assert lines == [f'sglang-sm120: {start} must be one of bf16, int8, not "fp4"']
    assert "Traceback" not in result.stderr


def test_phase_1_hooks_the_argument_code_only_and_imports_nothing_deep(runs):
    seen = json.loads(output(runs["parse flags"]))
    assert seen["hooked"] == [
        "sglang.srt.runtime_context.publish",
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "sglang.srt.server_args.ServerArgs.from_cli_args",
    ]
    assert seen["deep"] == [] and set(seen["hooked"]) <= set(seen["patched"])


def test_engine_options_come_from_the_environment_and_are_checked(runs):
    seen = json.loads(output(runs["resolution"]).splitlines()[-1])
    assert seen["off"] == "auto" and seen["fits"] == "host"
    assert seen["islands"].startswith("OptionError: sglang-sm120: --sm120-islands")
    assert "--disable-custom-all-reduce want the same sums" in seen["contradiction"]
    assert seen["changed"].startswith('HookRefused: sglang-sm120: the "fusion" part knows SGLang')
    assert "SGLANG_SM120_TIMEOUT_MS must be a whole number" in seen["wrong variable"]


def test_sglang_release_with_another_signature_refuses_to_start_when_asked_for(runs):
    result = runs["changed release, asked for"]
    assert result.returncode == 1 and "Traceback" not in result.stderr
    (line,) = [li for li in result.stderr.splitlines() if "sglang-sm120:" in li]
    assert 'the "launch" part knows SGLang' in line
    assert "takes (server_args, role), not (server_args, *, role, hf_config=..., ranks=...)" in line


def test_sglang_release_with_another_signature_runs_without_us_when_not_asked_for(runs):
    result = runs["changed release, not asked for"]
    assert json.loads(output(result)) == []
    assert 'the "launch" part knows SGLang' in result.stderr


def test_package_has_a_version():
    assert sglang_sm120.__version__[0].isdigit()
