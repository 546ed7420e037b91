"""Draft-length decisions: when to draft, when to stop, and that every rank decides alike."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.verify.acceptance import AcceptanceEstimator
from sglang_sm120.verify.cost import COLD, CostModel, StageTimes, load_table
from sglang_sm120.verify.policy import DraftLengthPolicy, PolicyConfig

CANDIDATES = [0, 1, 2, 3, 5]


def times(plain_ms: float, ratio_at_3: float, batches=(1, 8, 64)) -> list[StageTimes]:
    """A machine where 3 drafts cost `ratio_at_3` plain steps and other counts lie on the line."""
    return [
        StageTimes(
            steps=s,
            batch=b,
            draft_ms=0.0,
            verify_ms=plain_ms * (1 + (ratio_at_3 - 1) * s / 3),
            extend_ms=0.02 * plain_ms,
        )
        for s in CANDIDATES
        for b in batches
    ]


def make(plain_ms=12.0, ratio_at_3=2.5, initial=3, config=None) -> DraftLengthPolicy:
    table = CostModel(times(plain_ms, ratio_at_3)).table
    return DraftLengthPolicy(CANDIDATES, initial, table, config)


def serve(policy, rates, passes, batch=1, seed=0) -> list[int]:
    """Serve passes whose drafts are accepted with these conditional rates; returns the steps used."""
    rng = random.Random(seed)
    used = []
    for _ in range(passes):
        steps = policy.get_steps_for_batch(batch)
        accepted = []
        for _ in range(batch):
            n = 0
            while n < steps and rng.random() < rates[n]:
                n += 1
            accepted.append(n)
        policy.on_verify_complete(accepted, batch)
        used.append(steps)
    return used


# 1 + q + q^2 + q^3 = 2.0 and 3.4
ACCEPT_2_0 = [0.544] * 8
ACCEPT_3_4 = [0.897] * 8


def test_c27_verify_that_costs_more_than_it_gains_is_switched_off():
    used = serve(make(ratio_at_3=2.5), ACCEPT_2_0, 600)
    # 1 draft would cost 1.5 steps for 1.54 tokens: worth nothing to speak of; deeper counts lose.
    assert sum(s >= 2 for s in used[100:]) < 25
    rates = [0.35] * 8
    used = serve(make(ratio_at_3=2.5), rates, 600)
    assert sum(s == 0 for s in used[100:]) > 0.9 * 500


def test_c27_cheap_verify_with_good_drafts_goes_up():
    used = serve(make(ratio_at_3=1.4, initial=0), ACCEPT_3_4, 600)
    assert sum(s >= 3 for s in used[200:]) > 0.9 * 400


def test_falls_to_zero_and_comes_back_when_acceptance_rises():
    policy = make(ratio_at_3=1.8)
    low = serve(policy, [0.1] * 8, 800)
    assert low[-1] == 0 and sum(s == 0 for s in low[200:]) > 500
    high = serve(policy, ACCEPT_3_4, 1500, seed=1)
    assert sum(s >= 3 for s in high[-300:]) > 250
    again = serve(policy, [0.1] * 8, 500, seed=2)
    assert sum(s == 0 for s in again[-200:]) > 180


def test_budget_bounds_what_probing_costs():
    policy = make(ratio_at_3=2.5)
    serve(policy, [0.05] * 8, 500)
    used = serve(policy, [0.05] * 8, 4000, seed=3)
    table = policy.table
    spent = sum(table.pass_ms(s if s else COLD, 1) for s in used)
    ideal = table.pass_ms(COLD, 1) * len(used)
    assert any(s > 0 for s in used), "it must keep looking"
    assert spent / ideal < 1.012


def test_dwell_and_margin_keep_it_still_at_break_even():
    # Both counts worth the same: 1.5 tokens for 1.5 steps.
    policy = make(ratio_at_3=2.5, initial=1)
    serve(policy, [0.5] * 8, 3000)
    assert policy.switches < 40
    config = policy.config
    assert config.dwell >= config.interval


def test_batch_sizes_decide_on_their_own():
    cheap = [t for t in times(12.0, 1.3) if t.batch == 1]
    dear = [t for t in times(40.0, 4.0) if t.batch == 64]
    policy = DraftLengthPolicy(CANDIDATES, 3, CostModel(cheap + dear).table)
    policy.set_cuda_graph_bs([1, 64])
    small, large = [], []
    for turn in range(20):
        small += serve(policy, [0.7] * 8, 20, batch=1, seed=turn)
        large += serve(policy, [0.7] * 8, 20, batch=60, seed=turn)
    assert sum(s >= 2 for s in small[100:]) > 250
    assert sum(s == 0 for s in large[100:]) > 250


def test_rows_above_the_limit_are_never_chosen():
    policy = make(ratio_at_3=1.01, config=PolicyConfig(max_rows=128))
    policy.set_cuda_graph_bs([1, 8, 64])
    assert policy.cuda_graph_bs_for_step(5) == [1, 8]
    assert policy.cuda_graph_bs_for_step(0) == [1, 8, 64]
    assert max(serve(policy, ACCEPT_3_4, 300, batch=64)) <= 1


def test_leaving_cold_runs_draft_extend_first():
    policy = make(ratio_at_3=1.8)
    serve(policy, [0.05] * 8, 500)
    rng = random.Random(5)
    warm_run, seen_probe = 0, False
    for _ in range(3000):
        steps = policy.get_steps_for_batch(1)
        if steps > 0:
            assert warm_run >= policy.config.rewarm or not policy.skips_draft_extend
            if not seen_probe:
                assert warm_run >= policy.config.rewarm
            seen_probe = True
        warm_run = 0 if policy.skips_draft_extend else warm_run + 1
        policy.on_verify_complete([int(rng.random() < 0.05) if steps else 0], 1)
    assert seen_probe


def test_reports_later_than_the_next_pass_are_filed_under_the_right_count():
    """SGLang's overlap schedule reports pass n after pass n+1 was started."""
    policy = make()
    asked = [policy.get_steps_for_batch(2) for _ in range(2)]
    policy.on_verify_complete([asked[0], 0], 2)
    with pytest.raises(ValueError, match="do not fit"):
        policy.on_verify_complete([asked[1] + 1, 0], 2)
    with pytest.raises(RuntimeError, match="no pass is open"):
        policy.on_verify_complete([0, 0], 2)


def test_wrong_construction_is_refused():
    table = CostModel(times(1.0, 2.0)).table
    with pytest.raises(ValueError, match="not among"):
        DraftLengthPolicy([0, 1], 3, table)
    with pytest.raises(ValueError, match="candidate"):
        DraftLengthPolicy([], 0, table)
    with pytest.raises(ValueError, match="candidate"):
        DraftLengthPolicy([-1, 2], 2, table)


SCRIPT = """
import random, sys
from sglang_sm120.verify.cost import load_table
from sglang_sm120.verify.policy import DraftLengthPolicy
policy = DraftLengthPolicy([0, 1, 2, 3, 5], 3, load_table(bytes.fromhex(sys.argv[1])))
rng = random.Random(int(sys.argv[2]))
out = []
for i in range(1500):
    batch = rng.choice((1, 3, 8, 40))
    rate = 0.1 if i % 700 < 350 else 0.9
    steps = policy.get_steps_for_batch(batch)
    out.append(steps)
    accepted = []
    for _ in range(batch):
        n = 0
        while n < steps and rng.random() < rate:
            n += 1
        accepted.append(n)
    policy.on_verify_complete(accepted, batch)
print(policy.digest, policy.switches, "".join(map(str, out)))
"""


def test_ranks_decide_alike_in_separate_processes():
    snapshot = CostModel(times(10.0, 1.7)).snapshot().hex()
    runs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT, snapshot, "4"],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(p for p in sys.path if p)},
        ).stdout
        for seed in (1, 2)
    ]
    assert runs[0] == runs[1]
    digest, switches, steps = runs[0].split()
    assert int(switches) > 2 and len(set(steps)) >= 3


def test_digest_tells_ranks_apart_that_saw_different_acceptance():
    one, two = make(), make()
    for policy, accepted in ((one, 1), (two, 2)):
        policy.get_steps_for_batch(1)
        policy.on_verify_complete([accepted], 1)
    assert one.digest != two.digest


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.02, 0.97), min_size=5, max_size=5),
    st.floats(1.05, 4.0),
    st.integers(0, 5),
)
def test_policy_survives_any_rates_and_costs(rates, ratio, seed):
    policy = make(ratio_at_3=ratio)
    used = serve(policy, rates + [0.5] * 3, 120, batch=1 + seed, seed=seed)
    assert set(used) <= set(CANDIDATES)
    assert 1.0 <= policy.acceptance.tokens(5) <= 6.0
    assert policy.acceptance.tokens(5, spread=1.0) >= policy.acceptance.tokens(5)


class TestAcceptance:
    def test_rates_converge_to_the_truth(self):
        estimator = AcceptanceEstimator(3)
        rng = random.Random(1)
        for _ in range(400):
            accepted = []
            for _ in range(8):
                n = 0
                while n < 3 and rng.random() < (0.8, 0.5, 0.3)[n]:
                    n += 1
                accepted.append(n)
            estimator.observe(3, accepted)
        assert estimator.rate(1) == pytest.approx(0.8, abs=0.04)
        assert estimator.rate(2) == pytest.approx(0.5, abs=0.05)
        assert estimator.rate(3) == pytest.approx(0.3, abs=0.07)
        assert estimator.tokens(3) == pytest.approx(1 + 0.8 + 0.4 + 0.12, abs=0.1)

    def test_misses_do_not_feed_on_themselves(self):
        """Seven misses, then silence: belief stays where the evidence left it."""
        estimator = AcceptanceEstimator(2)
        for _ in range(7):
            estimator.observe(1, [0])
        at_stop = estimator.rate(1)
        for _ in range(1000):
            estimator.observe(0, [0])
        assert estimator.rate(1) == pytest.approx(at_stop, abs=0.02)
        assert estimator.tokens(1, spread=1.0) > 1.5, "unknown again, so worth a look"

    def test_a_jump_restarts_the_long_window(self):
        estimator = AcceptanceEstimator(2)
        for _ in range(300):
            estimator.observe(1, [1] * 4)
        for _ in range(12):
            estimator.observe(1, [0] * 4)
        assert estimator.changes >= 1
        assert estimator.rate(1) < 0.75
        steady = AcceptanceEstimator(2, surprise=1e9)
        for _ in range(300):
            steady.observe(1, [1] * 4)
        for _ in range(12):
            steady.observe(1, [0] * 4)
        assert estimator.rate(1) < steady.rate(1) - 0.1

    def test_counts_that_cannot_be_are_refused(self):
        with pytest.raises(ValueError):
            AcceptanceEstimator(3).observe(2, [3])
        with pytest.raises(ValueError):
            AcceptanceEstimator(3).observe(2, [-1])
        with pytest.raises(ValueError):
            AcceptanceEstimator(0)


def test_a_table_from_rank_0_changes_decisions_everywhere():
    policy = make(ratio_at_3=1.2)
    assert serve(policy, [0.6] * 8, 300)[-1] >= 2
    slow = CostModel(times(12.0, 6.0))
    policy.install(load_table(slow.snapshot()))
    assert sum(s == 0 for s in serve(policy, [0.6] * 8, 300)[-150:]) > 120
