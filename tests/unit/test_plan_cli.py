"""`sglang-sm120 probe` and `choices` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from sglang_sm120.cli.main import build
from sglang_sm120.comm import plan_cache
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.plan import Choice, Entry, Plan
from sglang_sm120.fabric.islands import flat
from sglang_sm120.fabric.report import ProbeReport
from sglang_sm120.fabric.versions import Versions
from typer.testing import CliRunner

FIXTURES = Path(__file__).parents[1] / "fixtures" / "machines"


def run(*args: str):
    return CliRunner().invoke(build([args[0]]), list(args), env={"COLUMNS": "160"})


def test_probe_of_a_described_machine_says_simulated_and_judges() -> None:
    sound = run("probe", "--from", str(FIXTURES / "three-gpus"))
    assert sound.exit_code == 0 and "simulated" in sound.stdout and "sound" in sound.stdout
    staged = run("probe", "--from", str(FIXTURES / "staged-p2p"))
    assert staged.exit_code == 2 and "options nvidia" in staged.stdout


def test_probe_json_feeds_the_doctor(tmp_path) -> None:
    got = run("probe", "--from", str(FIXTURES / "one-bad-direction"), "--json")
    report = msgspec.json.decode(got.stdout, type=ProbeReport)
    assert got.exit_code == 2 and report.failures[0].kind == "corrupt"
    path = tmp_path / "report.json"
    path.write_text(got.stdout)
    seen = run(
        "doctor", "--from", str(FIXTURES / "one-bad-direction"), "--probe", str(path), "--json"
    )
    assert seen.exit_code == 2
    assert json.loads(seen.stdout)["findings"][0]["id"] == "probe-veto"


def test_probe_between_processes_of_this_machine() -> None:
    got = run("probe", "--ranks", "2")
    assert got.exit_code == 0 and "host memory" in got.stdout and "measured" in got.stdout


def test_probe_without_a_subject_says_what_to_give() -> None:
    got = run("probe")
    assert got.exit_code == 3 and "--machine" in got.stdout


def test_plan_of_a_described_machine() -> None:
    file = str(FIXTURES / "dual-socket-virtual-switches" / "fabric.toml")
    got = run("choices", "--machine", file, "--batch", "1,4", "--tokens", "4", "--json")
    plan = Plan.from_json(got.stdout.encode())
    assert [e.rows for e in plan.entries] == [4, 16]
    assert {e.choice.schedule for e in plan.entries} == {"island_dataflow"}
    shown = run("choices", "--machine", file)
    assert "simulated" in shown.stdout and "one_shot is never used" in shown.stdout
    refused = run("choices", "--machine", file, "--backend", "flashinfer")
    assert refused.exit_code == 3 and "flashinfer" in refused.stdout


def test_kept_plans_are_listed_and_foreign_files_skipped(tmp_path) -> None:
    assert run("choices", "--cache", str(tmp_path)).exit_code == 1
    plan = Plan(
        group="tp",
        world=2,
        hidden=64,
        itemsize=2,
        islands=flat(2),
        entries=(Entry(Op.ALL_REDUCE, 8, Choice(backend="native", schedule="one_shot", ctas=4)),),
    )
    who = plan_cache.Identity(
        gpus=(), versions=Versions(), group="tp", world=2, hidden=64, itemsize=2, rows=(8,)
    )
    plan_cache.store(tmp_path, plan_cache.Record(identity=who, plan=plan))
    (tmp_path / "foreign.json").write_text("{}")
    got = run("choices", "--cache", str(tmp_path))
    assert got.exit_code == 0 and plan.digest() in got.stdout and "native/one_shot/4c" in got.stdout
