"""Fusion on and off, EAGLE-3 on and off, Llama and DeepSeek-V3 style: same tokens, same acceptance, all sums ours.

The three ways to start SGLang are spread over the servers: `python -m sglang.launch_server`, `sglang serve` (DeepSeek
style, plain, fused) and `sglang.Engine` (Llama, plain, fused).
"""

from __future__ import annotations

import re

import pytest
from conftest import MEASURED, NEW_TOKENS, Served, Way, known_text

pytest.importorskip("sglang")

FAMILIES = ("llama", "deepseek")
WAYS = [
    Way(f, eagle, fused) for f in FAMILIES for eagle in (False, True) for fused in (False, True)
]
FUSED_WAYS = [way for way in WAYS if way.fused]


def fusable(run: Served) -> tuple[int, int]:
    """(attention sums, FFN sums) of one generating pass that SGLang leaves to a fused kernel.

    The last FFN's sum goes to the final norm unfused. With EAGLE-3, SGLang's Llama also completes the sum before each
    captured layer early; its DeepSeek captures after the norm and does not.
    """
    early = len(run.model.aux_layers) if run.way.eagle and run.way.family == "llama" else 0
    return run.model.layers, run.model.layers - 1 - early


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tokens_are_the_known_text_alone_and_in_a_batch(served, way):
    run = served(way)
    # The tokenizer of the tiny models maps bytes, so the known text is the known tokens.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.model.target)
    known = list(known_text(run.model))
    assert [tokenizer.decode(list(ids)) for ids in run.one_by_one] == known
    assert run.together == run.one_by_one
    assert all(len(ids) == NEW_TOKENS for ids in run.one_by_one)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("eagle", [False, True], ids=["plain", "eagle3"])
def test_fusion_changes_no_token(served, family, eagle):
    stock, fused = served(Way(family, eagle, False)), served(Way(family, eagle, True))
    assert fused.one_by_one == stock.one_by_one
    assert fused.together == stock.together


@pytest.mark.parametrize("family", FAMILIES)
def test_fusion_changes_no_accept_length(served, family):
    stock, fused = served(Way(family, True, False)), served(Way(family, True, True))
    assert fused.accept_lengths == stock.accept_lengths
    assert min(stock.accept_lengths) > 1.8


@pytest.mark.parametrize("way", FUSED_WAYS, ids=str)
def test_every_sum_that_can_be_fused_is_fused_and_gloo_does_none(served, way):
    run = served(way)
    forward = "verify" if way.eagle else "decode"
    attention, ffn = fusable(run)
    for report in run.reports:
        assert report["passes"][forward] > 0
        per_pass = report["sums_per_pass"][forward]
        # The rest is plain: the embedding, the last FFN, and what SGLang completes early.
        assert per_pass == {
            "fused_attention_sum": attention,
            "fused_ffn_sum": ffn,
            "plain": 2 * run.model.layers + 1 - attention - ffn,
        }
        gloo = {f: kinds.get("gloo", 0) for f, kinds in report["sums"].items() if f != "outside"}
        assert not any(gloo.values()), gloo
        counted = sum(
            n for kinds in report["sums"].values() for k, n in kinds.items() if k != "gloo"
        )
        assert sum(report["calls"]["tp"].values()) == counted


@pytest.mark.parametrize("family", FAMILIES)
def test_deepseek_verify_pass_has_2l_minus_1_fused_sums_and_all_ranks_count_alike(served, family):
    run = served(Way(family, True, True))
    first, second = run.reports
    assert first["sums"] == second["sums"] and first["passes"] == second["passes"]
    fused = sum(
        n for kind, n in first["sums_per_pass"]["verify"].items() if kind.startswith("fused")
    )
    least = 2 * run.model.layers - 1 - (len(run.model.aux_layers) if family == "llama" else 0)
    assert fused >= least


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_server_sums_with_gloo_and_has_none_of_our_hooks(served, family):
    run = served(Way(family, True, False))
    for report in run.reports:
        assert report["groups"] == {} and report["calls"] == {}
        assert report["sums_per_pass"]["verify"] == {"gloo": 2 * run.model.layers + 1}


def test_metrics_hold_the_counters_of_the_sums(served):
    run = served(MEASURED)
    found = dict(re.findall(r"sglang:sm120_sums_total\{([^}]*)\} (\S+)", run.metrics))
    counted = {
        (kind, forward): float(value)
        for labels, value in found.items()
        if 'tp_rank="0"' in labels
        for kind, forward in [
            (re.search(r'kind="(\w+)"', labels)[1], re.search(r'forward="(\w+)"', labels)[1])
        ]
    }
    for kind in ("fused_attention_sum", "fused_ffn_sum", "plain"):
        assert counted[kind, "verify"] == run.reports[0]["sums"]["verify"][kind]
    assert "sglang:sm120_passes_total{" in run.metrics


@pytest.mark.parametrize("way", FUSED_WAYS, ids=str)
def test_log_says_once_what_serves_the_group(served, way):
    lines = [li for li in served(way).log.splitlines() if "sglang-sm120" in li and "] " in li]
    assert sum('backend "host" is ready for group "tp"' in li for li in lines) == 1
    assert sum("on SGLang" in li and "'enabled': True" in li for li in lines) == 1
