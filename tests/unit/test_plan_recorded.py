"""The decision on times that were recorded on one H200 (4 and 8 ranks under MPS), shaken as a busy start shakes them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from sglang_sm120.comm.choosing import HANDICAP
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.planner import Candidate, Request, make_plan
from sglang_sm120.fabric.islands import flat
from sglang_sm120.fabric.verdict import Verdict

RESULTS = Path(__file__).parents[2] / "benchmark" / "results"
ROWS = (1, 2, 4, 8, 16, 32, 64)
SEEDS = range(200)
OPS = (Op.ALL_REDUCE, Op.ALL_REDUCE_RMSNORM, Op.ALL_REDUCE_RMSNORM_FP8)


def recorded(world: int) -> dict[str, dict[str, float]]:
    path = RESULTS / f"2026-12-02-h200-plan-quality-{world}.json"
    return json.loads(path.read_text())["again"]


def candidates(times: dict[str, dict[str, float]], seed: int) -> list[Candidate]:
    """Every measurement is 1 % off, and one in twenty is disturbed by up to a half."""
    rng = random.Random(seed)

    def one(name: str) -> Candidate:
        backend, schedule, ctas = (*name.split("/"), "", "")[:3]

        def time(op: Op, rows: int) -> float:
            us = times[f"{op.value} {rows}"].get(name, math.inf)
            return us * rng.uniform(1.0, 1.01) * (rng.uniform(1, 1.5) if rng.random() < 0.05 else 1)

        return Candidate(backend, schedule, int(ctas.rstrip("c") or 0), time)

    return [one(name) for name in times["all_reduce 1"]]


@pytest.mark.parametrize("world", [4, 8])
def test_choices_stay_within_five_percent_of_the_best(world: int) -> None:
    times = recorded(world)
    asked = Request(group="tp", world=world, hidden=7168, itemsize=2, rows=ROWS, ops=OPS)
    far: list[str] = []
    for seed in SEEDS:
        plan = make_plan(
            asked, candidates(times, seed), report=None, islands=flat(world), verdict=Verdict(),
            rank=0, exchange=lambda mine: [mine],
        )  # fmt: skip
        for op in OPS:
            for rows in ROWS:
                here = times[f"{op.value} {rows}"]
                best = min(t * (1 + HANDICAP.get(n.split("/")[0], 0.0)) for n, t in here.items())
                name = plan.lookup(op, rows).name
                if here[name] > 1.05 * best:
                    far.append(f"seed {seed} {op.value} {rows}: {name} {here[name] / best:.2f}")
    # What is left needs a candidate to be disturbed in its looks or a change that pays less than it costs; with one look
    # 1.3 % are further off.
    assert len(far) <= 0.0025 * len(SEEDS) * len(OPS) * len(ROWS), far
