"""The policy against every fixed step count in hindsight, on simulated machines and texts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmark" / "policy_regimes.py"


def _load():
    spec = importlib.util.spec_from_file_location("policy_regimes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # Registered first: the module's dataclasses look themselves up while they are made.
    sys.modules["policy_regimes"] = module
    spec.loader.exec_module(module)
    return module


regimes = _load()


def test_regimes_cover_what_they_claim():
    assert len(regimes.REGIMES) >= 6
    batches = {regime.batch for regime in regimes.REGIMES}
    assert min(batches) == 1 and max(batches) >= 64
    best = {
        r.name: regimes.play(regimes.FixedSteps(3), r.trace(0.1), r.machine.cost).accept_length
        for r in regimes.REGIMES
    }
    assert min(best.values()) < 1.3 and max(best.values()) > 3.4


@pytest.mark.parametrize("regime", regimes.REGIMES, ids=lambda r: r.name)
def test_policy_is_near_the_best_fixed_count_and_never_loses_to_plain(regime):
    row = regimes.compare(regime, with_stock=False, scale=0.5, seed=11)
    assert row["ours_over_best"] >= 0.95, row
    assert row["ours_over_plain"] >= 0.98, row


def test_without_costs_the_same_policy_loses_on_a_collapsed_fabric():
    """The bound above is not a property of the regimes: a policy blind to cost fails it."""
    regime = next(r for r in regimes.REGIMES if "acceptance 1.2, C1" in r.name)
    trace = regime.trace(0.3)
    plain = regimes.play(regimes.FixedSteps(regimes.COLD), trace, regime.machine.cost)
    blind = regimes.play(regimes.FixedSteps(3), trace, regime.machine.cost)
    assert blind.rate < 0.6 * plain.rate


def test_stock_policy_plays_the_same_traces():
    pytest.importorskip("sglang", reason="SGLang is not installed")
    regime = next(r for r in regimes.REGIMES if r.name.startswith("collapsed fabric, field"))
    row = regimes.compare(regime, with_stock=True, scale=0.3)
    assert 0.0 < row["stock_over_best"] <= 1.1
    assert row["ours"] > row["stock"], row
