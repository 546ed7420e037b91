"""What a server says when it ends: a killed rank, a wrong option, an SGLang that the hooks do not know."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import KILLED

pytest.importorskip("sglang")

# A call that waits for the rank says so itself; the watch over the processes also sees a death between two calls.
SENTENCE = re.compile(r"sglang-sm120: .*rank 1.*(missing in call|has died)")


def test_killed_rank_ends_the_server_within_five_seconds_and_is_named(served):
    death = served(KILLED).death
    said = [line for line in death.log.splitlines() if SENTENCE.search(line)]
    assert said, death.log[-3000:]
    assert death.seconds < 5.0, death.log[-3000:]
    assert not death.left


def launch(*flags: str, entry: tuple[str, ...] = ("-m", "sglang.launch_server"), **environ: str):
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, *entry, "--model-path", "dummy", "--device", "cpu", "--tp", "2", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "SGLANG_PLATFORM": "sm120_sim", **environ},
    )
    return result, time.monotonic() - began


def our_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("sglang-sm120: ")]


@pytest.mark.parametrize(
    "entry", [("-m", "sglang.launch_server"), (str(Path(sys.executable).with_name("sglang")), "serve")],
    ids=["launch_server", "serve"],
)  # fmt: skip
def test_wrong_option_ends_the_launch_with_one_sentence(entry):
    result, _ = launch("--enable-sm120-fusion", "--sm120-islands", "0,0;1", entry=entry)
    assert result.returncode != 0
    (line,) = our_lines(result.stderr)
    assert "--sm120-islands must be auto or groups of ranks" in line and '"0,0;1"' in line
    assert "Traceback" not in result.stderr


def test_islands_that_do_not_fit_the_ranks_end_the_launch(tmp_path, built):
    result, _ = launch(
        "--enable-sm120-fusion", "--sm120-islands", "0,1;2,3", "--model-path", built("llama").target
    )
    assert result.returncode != 0
    (line,) = our_lines(result.stderr)
    assert "names ranks 0 to 3" in line and "ranks 0 to 1" in line


# Another release: the factory of fused candidates takes one more parameter.
OTHER_RELEASE = """
import importlib.abc, importlib.machinery, sys
NAME = "sglang.srt.layers.layer_boundary.fusions.allreduce"
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            known = module.attn_input_fusions
            def attn_input_fusions(plan, read=None, *, overlap):
                return known(plan)
            module.attn_input_fusions = attn_input_fusions
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""


def test_sglang_release_with_another_signature_refuses_to_start(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(OTHER_RELEASE))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result, _ = launch("--enable-sm120-fusion", PYTHONPATH=path)
    assert result.returncode != 0
    (line,) = our_lines(result.stderr)
    assert 'the "fusion" part knows SGLang' in line
    assert "attn_input_fusions takes (plan, read=..., *, overlap), not (plan, read=...)" in line
    assert "Traceback" not in result.stderr
