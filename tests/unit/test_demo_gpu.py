"""`demo --gpu` without a GPU: what it refuses, what it calls wrong, what its table says; servers are stand-ins."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import typer
from rich.console import Console
from sglang_sm120.cli import demo_gpu
from sglang_sm120.sim import gpu_trial, shared_gpu
from sglang_sm120.sim.gpu_trial import GpuOutcome, GpuTrial, Passes, questions, run_all, setups
from sglang_sm120.sim.host_use import HostUse, RankUse
from sglang_sm120.sim.models import Built
from sglang_sm120.sim.server import ServerError


def built(text: str = "") -> Built:
    return Built(
        family="kimi-proxy", target="/none/target", drafter="/none/drafter", layers=5, hidden=7168,
        aux_layers=(1, 2, 3), text=text, context=1, max_length=4096, margin=0.0, draft_accept_length=2.0,
    )  # fmt: skip


def outcome(name: str, *, right: int = 8, us: float = 100.0, death: str = "") -> GpuOutcome:
    setup = setups()[name]
    passes = Passes(
        span=4.0, communication=us * 11 / 1e3, transfer=None, norms=0.03, idle=0.5, all_reduces=11,
        by={"NCCL": (11, us)},
    )  # fmt: skip
    return GpuOutcome(
        name=name, title=setup.title, start_s=50.0, asked=8, right=right, answers=[], tokens_per_s=200.0,
        accept_length=2.0, pass_ms=9.0, passes=passes, calls={"tp": {"all_reduce": 3}} if setup.ours else {},
        metrics=[], plan=[], death=death,
    )  # fmt: skip


def test_the_walk_of_the_proxy_is_asked_and_known() -> None:
    asked = questions(built(), 3, 16)
    assert len(asked) == 3
    for prompt, answer in asked:
        assert len(prompt) == 48 and len(answer) == 16
        walk = prompt + answer
        assert all((a + 101) % 256 == b for a, b in zip(walk, walk[1:]))


def test_adaptive_lengths_are_configured_and_their_log_lines_kept(tmp_path: Path) -> None:
    trial = GpuTrial(setups()["adaptive"], built(), 2, tmp_path)
    command = " ".join(trial.server.command)
    assert (
        f"--speculative-adaptive --speculative-adaptive-config {tmp_path}/adaptive.json" in command
    )
    assert json.loads((tmp_path / "adaptive.json").read_text()) == {"1": {"candidate_steps": [0, 1, 3, 5]}}  # fmt: skip
    (tmp_path / "adaptive.log").write_text(
        "[x TP0] sglang-sm120: timed passes at batch 1 by draft steps: 0: 3 ms\n"
        '[x TP0] sglang-sm120: {"rank":0,"passes":{}}\n'
        "[x TP1] sglang-sm120: 5 draft steps at batch 1 after 40 passes\n"
        "[x TP0] sglang-sm120: 1 draft steps (accept length 1.90) at batch 1 after 40 passes\n"
        "[x TP0] Decode batch, #running-req: 1\n"
    )
    assert trial._drafting() == [
        "timed passes at batch 1 by draft steps: 0: 3 ms",
        "1 draft steps (accept length 1.90) at batch 1 after 40 passes",
    ]


def test_wrong_answers_a_silent_death_and_unused_kernels_are_named() -> None:
    fine = [outcome("eagle3"), outcome("plugin", death='rank 3 of group "tp" (process 7) has died')]
    assert demo_gpu.verdict(fine) == []
    idle = outcome("plugin")
    idle.calls = {}
    problems = demo_gpu.verdict(
        [outcome("eagle3", right=6), outcome("kernels", death="the server still ran"), idle]
    )
    assert len(problems) == 3
    assert "2 of 8 answers are wrong" in problems[0]
    assert "still ran" in problems[1]
    assert "never called" in problems[2]


def test_the_table_names_the_rig_and_gives_ratios_to_plain_eagle3() -> None:
    outcomes = [outcome("eagle3", us=100.0), outcome("plugin", us=25.0)]
    console = Console(width=150, record=True)
    console.print(demo_gpu.table(built(), outcomes, "4 ranks on one GPU under MPS"))
    text = console.export_text()
    assert "4 ranks on one GPU under MPS" in text and "not on PCIe" in text
    assert "1.100 (1.00x)" in text and "0.275 (0.25x)" in text
    assert "11 x 25.0 us NCCL" in text


def test_unknown_servers_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="tensorrt: choose from plain, eagle3"):
        demo_gpu.run(
            "deepseek", 2, ("eagle3", "tensorrt"), prompts=1, tokens=8, turns=1, cache=None, json=None,
            flashinfer="", folder=None,
        )  # fmt: skip


def test_a_machine_without_mps_or_with_an_old_nccl_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("nvidia-smi", "nvidia-cuda-mps-control"):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(shared_gpu.RigError, match=f"{program} was not found"):
            shared_gpu.check()
        (tmp_path / program).write_text("#!/bin/sh\n")
        os.chmod(tmp_path / program, stat.S_IRWXU)
    monkeypatch.setattr(shared_gpu, "nccl_version", lambda: (2, 28, 9))
    with pytest.raises(shared_gpu.RigError, match="NCCL 2.28.9 refuses several ranks on one GPU"):
        shared_gpu.check()
    monkeypatch.setattr(shared_gpu, "nccl_version", lambda: (2, 30, 7))
    shared_gpu.check()


def test_mps_of_the_caller_is_used_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("PATH", "")  # starting or stopping a daemon would fail
    with shared_gpu.mps() as environment:
        assert environment == dict(os.environ)
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path)
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path)


CONTROL = """#!/bin/sh
echo "$CUDA_MPS_PIPE_DIRECTORY|$LD_PRELOAD|$@" >> "{log}"
if [ "$1" = -d ]; then touch "$CUDA_MPS_PIPE_DIRECTORY/control"; exit {code}; fi
cat >> "{log}"
"""


@pytest.mark.parametrize("code", [0, 1])
def test_mps_is_started_for_the_ranks_and_quits_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    control, log = tmp_path / shared_gpu.MPS_CONTROL, tmp_path / "log"
    control.write_text(CONTROL.format(log=log, code=code))
    os.chmod(control, stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "nobody"))
    monkeypatch.delenv("CUDA_MPS_LOG_DIRECTORY", raising=False)
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    before = dict(os.environ)
    if code:
        with pytest.raises(shared_gpu.RigError, match="MPS did not start"), shared_gpu.mps():
            raise AssertionError("the daemon failed")
    else:
        with shared_gpu.mps() as environment:
            pipe = environment["CUDA_MPS_PIPE_DIRECTORY"]
            assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == pipe and Path(pipe, "control").exists()
        assert log.read_text() == f"{pipe}||-d\n{pipe}||\nquit\n" and not Path(pipe).exists()
    assert dict(os.environ) == before


def test_what_quit_leaves_of_mps_is_killed_and_nothing_else(tmp_path: Path) -> None:
    server = tmp_path / "nvidia-cuda-mps-server"
    server.symlink_to("/bin/sleep")
    mine, other = (
        subprocess.Popen([str(server), "60"], env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder})
        for folder in ("/tmp/mine", "/tmp/other")
    )
    try:
        shared_gpu._kill_mps_of("/tmp/mine")
        assert not psutil.pid_exists(mine.pid) and other.poll() is None
    finally:
        other.kill()
        other.wait()


class Scripted(GpuTrial):
    """A trial whose server is a line in a log."""

    log: list[str] = []

    def __init__(self, setup: gpu_trial.Setup, *_: object) -> None:
        self.setup = setup
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"].startswith("mps of ")

    def start(self) -> None:
        self.log.append(f"start {self.setup.name}")
        if self.setup.name == "pcie_ipc":
            raise ServerError("it ended")

    def measure(self, count: int, new: int, *, profile: bool) -> GpuOutcome:
        self.log.append(f"measure {self.setup.name}")
        return outcome(self.setup.name)

    def kill_a_rank(self) -> str:
        self.log.append(f"kill {self.setup.name}")
        return "rank 3 has died"

    def stop(self) -> None:
        self.log.append(f"stop {self.setup.name}")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log of scripted trials, in which an MPS must be closed before the next is opened."""
    opened: list[int] = []

    @contextlib.contextmanager
    def mps() -> Iterator[None]:
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
        opened.append(1)
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", f"mps of {len(opened)}")
        try:
            yield
        finally:
            monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")

    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(shared_gpu, "mps", mps)
    monkeypatch.setattr(gpu_trial, "GpuTrial", Scripted)
    Scripted.log = []
    return Scripted.log


def test_turns_alternate_and_the_last_of_ours_loses_a_rank(
    tmp_path: Path, scripted: list[str]
) -> None:
    chosen = [setups()[name] for name in ("eagle3", "plugin")]
    outcomes, failed = run_all(chosen, built(), 2, tmp_path, turns=3)
    assert not failed
    assert [o.name for o in outcomes] == ["eagle3", "plugin", "plugin", "eagle3", "eagle3", "plugin"]  # fmt: skip
    assert [o.death for o in outcomes] == ["", "", "", "", "", "rank 3 has died"]
    assert scripted.count("kill plugin") == 1


def test_an_mps_that_does_not_start_again_loses_no_figures(
    tmp_path: Path, scripted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, started = shared_gpu.mps, []

    @contextlib.contextmanager
    def once() -> Iterator[None]:
        started.append(1)
        if len(started) == 2:
            raise shared_gpu.RigError("MPS did not start: busy")
        with first():
            yield

    monkeypatch.setattr(shared_gpu, "mps", once)
    chosen = [setups()[name] for name in ("eagle3", "kernels", "plugin")]
    outcomes, failed = run_all(chosen, built(), 2, tmp_path)
    assert [o.name for o in outcomes] == ["eagle3", "plugin"]
    assert failed == ["EAGLE-3, our kernels alone: MPS did not start: busy"]


def test_turns_keep_their_own_logs_and_traces(tmp_path: Path) -> None:
    first, second = (GpuTrial(setups()["plugin"], built(), 2, tmp_path, turn) for turn in (1, 2))
    assert first.server.log == tmp_path / "plugin.log"
    assert second.server.log == tmp_path / "plugin-2.log"
    assert f"--sm120-stats {tmp_path}/plugin-2.stats" in " ".join(second.server.command)


def test_the_table_shows_the_median_turn_every_speed_and_the_hosts() -> None:
    every = []
    for name, speed in (("eagle3", 380.0), ("plugin", 250.0), ("plugin", 470.0), ("eagle3", 370.0),
                        ("eagle3", 400.0), ("plugin", 460.0)):  # fmt: skip
        one = outcome(name)
        one.tokens_per_s = speed
        ranks = tuple(RankUse(main=m, others=0.05, busiest=0.05, preempted=1.0) for m in (0.81, 0.97))  # fmt: skip
        one.host = HostUse(cores=16, busy=2.5, stolen=0.25, ranks=ranks)
        every.append(one)
    assert [(o.name, o.tokens_per_s) for o in demo_gpu.medians(every)] == [("eagle3", 380.0), ("plugin", 460.0)]  # fmt: skip
    console = Console(width=150, record=True)
    console.print(demo_gpu.table(built(), every, "a rig"))
    text = console.export_text()
    assert "460 (1.21x)" in text
    assert "380 370 400" in text and "250 470 460" in text
    assert "0.81 0.97" in text and "0.25" in text


def test_no_server_starts_beside_a_measured_one_and_a_failed_one_holds_up_none(
    tmp_path: Path, scripted: list[str]
) -> None:
    seen: list[int] = []
    chosen = [setups()[name] for name in ("eagle3", "pcie_ipc", "plugin")]
    outcomes, failed = run_all(
        chosen, built(), 4, tmp_path, on_outcome=lambda found, lost: seen.append(len(found))
    )
    assert [o.name for o in outcomes] == ["eagle3", "plugin"]
    assert failed == ["EAGLE-3, pcie_ipc: it ended"]
    assert outcomes[-1].death == "rank 3 has died"
    assert seen == [1, 1, 2]
    assert scripted == [
        "start eagle3", "measure eagle3", "stop eagle3",
        "start pcie_ipc", "stop pcie_ipc",
        "start plugin", "measure plugin", "kill plugin", "stop plugin",
    ]  # fmt: skip


def test_figures_are_written_after_every_server(tmp_path: Path) -> None:
    path = tmp_path / "out" / "figures.json"
    demo_gpu._write(path, "a rig", built(), [outcome("eagle3", right=7)], ["pcie_ipc: it ended"])
    figures = json.loads(path.read_text())
    assert figures["rig"].startswith("a rig")
    assert figures["outcomes"][0]["passes"]["by"] == {"NCCL": [11, 100.0]}
    assert len(figures["problems"]) == 2
