"""The demo's verdict and table from given outcomes, and its trial against a stand-in server."""

from __future__ import annotations

import json
import tempfile

import msgspec
import pytest
from rich.console import Console
from sglang_sm120.cli import demo
from sglang_sm120.cli.main import build
from sglang_sm120.sim import models, trial
from sglang_sm120.sim.server import ServerError
from typer.testing import CliRunner

BUILT = models.Built(
    family="deepseek", target="/t", drafter="/d", layers=6, hidden=128, aux_layers=(1, 2, 4), text="known text " * 9,
    context=8, max_length=64, margin=2.0, draft_accept_length=3.0,
)  # fmt: skip


def outcome(name, **changes):
    values = {
        "name": name, "answers": ["ab", "cd"], "right": 2, "tokens": 4, "accept_length": None,
        "forward": "decode", "passes": 4, "sums_per_pass": {"gloo": 13.0}, "gloo_total": 60,
        "start_s": 50.0, "serve_s": 2.0,
    }  # fmt: skip
    return trial.Outcome(**(values | changes))


def trio(**fused):
    good = {
        "forward": "verify", "accept_length": 3.1, "gloo_total": 0,
        "sums_per_pass": {"fused_attention_sum": 6.0, "fused_ffn_sum": 5.0, "plain": 2.0},
    }  # fmt: skip
    return [
        outcome(demo.PLAIN),
        outcome(demo.EAGLE, forward="verify", accept_length=3.1),
        outcome(demo.FUSED, **(good | fused)),
    ]


def test_fusable_sums_leave_out_the_last_ffn_and_what_llama_completes_early():
    assert demo.fusable_sums(BUILT) == 11
    assert demo.fusable_sums(msgspec.structs.replace(BUILT, family="llama", layers=8)) == 12


def test_a_good_trio_has_no_problems():
    assert demo.verdict(BUILT, trio()) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"answers": ["ab", "cX"]}, "answer 1 differs from plain"),
        ({"gloo_total": 1}, "gloo did 1 all-reduces"),
        ({"sums_per_pass": {"fused_attention_sum": 6.0, "fused_ffn_sum": 4.99}}, "10.99 sums per verify pass"),
        ({"sums_per_pass": {}}, "0.00 sums per verify pass were fused, 11 can be"),
    ],
)  # fmt: skip
def test_each_failure_is_named(change, sentence):
    problems = demo.verdict(BUILT, trio(**change))
    assert len(problems) == 1 and sentence in problems[0]


def test_wrong_text_everywhere_is_a_failure_even_when_all_agree():
    runs = trio()
    for run in runs:
        run.right = 1
    assert demo.verdict(BUILT, runs) == ["plain decoding gave the known text in 1 of 2 answers"]


def test_table_names_the_rig_and_shows_every_figure():
    console = Console(width=200, record=True)
    console.print(demo.table(BUILT, trio()))
    text = console.export_text()
    for part in ("CPU server", "2/2", "3.10", "4 decode", "4 verify", "11.00 of 11", "13.00", "60"):
        assert part in text


def run_demo(monkeypatch, tmp_path, outcomes):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo.models, "build", lambda family, cache, progress: BUILT)
    given = iter(outcomes)

    def fake(name, built, cases, flags, *, folder, on_ready, on_answer):
        on_ready()
        for _ in cases:
            on_answer()
        out = next(given)
        if isinstance(out, Exception):
            raise out
        assert out.name == name
        assert ("--enable-sm120-fusion" in flags) == (name == demo.FUSED)
        assert ("EAGLE3" in flags) == (name != demo.PLAIN)
        return out

    monkeypatch.setattr(demo, "run_trial", fake)
    argv = [
        "demo",
        "--json",
        str(tmp_path / "out" / "figures.json"),
        "--tokens",
        "8",
        "--prompts",
        "2",
    ]
    return CliRunner().invoke(build(argv), argv)


def test_command_exits_0_and_writes_the_figures(monkeypatch, tmp_path):
    result = run_demo(monkeypatch, tmp_path, trio())
    assert result.exit_code == 0, result.output
    assert not list(tmp_path.glob("sglang-sm120-demo-*"))
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert figures["problems"] == [] and len(figures["outcomes"]) == 3
    assert figures["model"]["family"] == "deepseek"


def test_command_exits_1_when_tokens_differ_or_the_server_fails(monkeypatch, tmp_path):
    result = run_demo(monkeypatch, tmp_path, trio(answers=["ab", "x"]))
    assert result.exit_code == 1 and "differs from plain" in result.output
    result = run_demo(monkeypatch, tmp_path, [ServerError("the server ended with status 3")])
    assert result.exit_code == 1 and "status 3" in result.output
    kept = list(tmp_path.glob("sglang-sm120-demo-*"))
    assert len(kept) == 2  # the logs of a failure stay, and the output says where
    assert any(path.name in result.output.replace("\n", "") for path in kept)


class FakeServer:
    """Answers with the prompt in capitals and writes counters like the plugin's."""

    reports = ()

    def __init__(self, model, flags, *, tp, log):
        self.stats, self.startup_s = flags[flags.index("--sm120-stats") + 1], 1.0

    def __enter__(self):
        for rank, report in enumerate(self.reports):
            with open(f"{self.stats}.rank{rank}", "wb") as out:
                out.write(msgspec.json.encode(report))
        return self

    def __exit__(self, *exc):
        pass

    def complete(self, prompt, *, max_tokens):
        return {"choices": [{"text": prompt.upper()[:max_tokens]}]}

    def accept_length(self):
        return 3.0

    def tail(self):
        return "the log"


def report(fused, gloo):
    per_pass = {"fused_attention_sum": fused, "plain": 2.0, "gloo": gloo}
    return {
        "passes": {"verify": 10, "extend": 2},
        "sums_per_pass": {"verify": per_pass},
        "sums": {
            "verify": {"gloo": int(gloo * 10)},
            "extend": {"gloo": 3},
            "outside": {"gloo": 99},
        },
    }


def test_trial_takes_the_worst_rank_and_leaves_out_sums_outside_of_passes(monkeypatch, tmp_path):
    monkeypatch.setattr(trial, "SimServer", FakeServer)
    monkeypatch.setattr(trial, "_SETTLE_S", 0.3)
    monkeypatch.setattr(FakeServer, "reports", (report(6.0, 0.0), report(5.5, 0.5)))
    cases = [models.Case("ab", "AB"), models.Case("cd", "no"), models.Case("ef", "EF")]
    ticks = []
    got = trial.run_trial("t", BUILT, cases, [], folder=tmp_path, on_answer=lambda: ticks.append(1))
    assert got.answers == ["AB", "CD", "EF"] and got.right == 2 and len(ticks) == 3
    assert got.sums_per_pass == {"fused_attention_sum": 5.5, "gloo": 0.5, "plain": 2.0}
    assert got.fused_per_pass == 5.5 and got.gloo_total == 3 + 5 + 3
    assert got.forward == "verify" and got.passes == 10 and got.tokens == 6


def test_missing_counters_are_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(trial, "_WAIT_S", 0.5)
    with pytest.raises(ServerError, match="were not written"):
        trial._final(tmp_path / "none", FakeServer("m", ["--sm120-stats", "x"], tp=1, log=None))
