"""What a server measures at its start, and that log, metrics and counters say the same about who serves.

No backend is named here: the host engine must win against gloo by its own times. Rig: CPU server, TP 2.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from conftest import NEW_TOKENS, cases_of, settled_reports

pytest.importorskip("sglang")

from sglang_sm120.sim.models import Built, Family
from sglang_sm120.sim.server import SimServer


@dataclass
class Planned:
    """What one server with measured choices said."""

    log: str
    metrics: str
    reports: list[dict[str, Any]]
    texts: list[str]
    expected: list[str]


@pytest.fixture(scope="module")
def planned(built: Callable[[Family], Built], tmp_path_factory: pytest.TempPathFactory) -> Planned:
    model = built("llama")
    folder = tmp_path_factory.mktemp("plan")
    flags = [
        "--enable-sm120-fusion", "--enable-metrics",
        "--sm120-plan-cache", str(folder / "plans"), "--sm120-stats", str(folder / "stats"),
    ]  # fmt: skip
    cases = cases_of(model)
    with SimServer(model.target, flags, log=folder / "server.log") as server:
        answers = server.generate([c.prompt for c in cases], max_new_tokens=NEW_TOKENS)
        reports = settled_reports(folder / "stats")
        metrics = httpx.get(f"{server.url}/metrics/", timeout=30).text
        log = server.log_text()
    assert list((folder / "plans").glob("*.json")), "kept for the next start"
    return Planned(log, metrics, reports, [a.text for a in answers], [c.expected for c in cases])


def samples(metrics: str, name: str) -> dict[tuple[str, ...], float]:
    """(group, op, backend, size) -> value of a counter, summed over what else labels it."""
    found: Counter[tuple[str, ...]] = Counter()
    for labels, value in re.findall(rf"^{name}\{{([^}}]*)\}} (\S+)$", metrics, re.M):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[tuple(named.get(k, "") for k in ("group", "op", "backend", "size"))] += float(value)
    return dict(found)


def test_the_log_has_the_plan_once_as_a_sentence_and_a_table_and_the_verdict(planned):
    lines = planned.log.splitlines()
    (sentence,) = [x for x in lines if "SM120 plan" in x and "for group tp:" in x]
    assert "measured now" in sentence and "host" in sentence
    (title,) = [x for x in lines if "SM120 plan" in x and "islands {0,1}" in x]
    digest = re.search(r"SM120 plan (\w{16})", title)[1]
    assert digest in sentence
    table = lines[lines.index(title) : lines.index(title) + 60]
    for op in ("all_reduce", "all_reduce_rmsnorm"):
        assert any(
            re.search(rf"│ {op} .*│ host .*│ +[\d.]+ │ +[\d.]+ │ (timed|between)", x) for x in table
        )
    (verdict,) = [x for x in lines if "SM120 verdict for group tp:" in x]
    assert "host may serve" in verdict and "every edge sound" in verdict and "us one way" in verdict


def test_all_ranks_hold_the_plan_that_the_log_shows(planned):
    (digest,) = {re.search(r"plan (\w{16})", r["plans"]["tp"])[1] for r in planned.reports}
    assert f"SM120 plan {digest}, group tp" in planned.log


def test_metrics_count_what_served_by_backend_and_size_class(planned):
    counted = samples(planned.metrics, "sglang_sm120_collective_calls_total")
    assert counted and all(group == "tp" and backend == "host" for group, _, backend, _ in counted)
    sizes = {size for _, _, _, size in counted}
    assert "16KiB" in sizes and sizes <= {"16KiB", "64KiB", "256KiB", "1MiB", "larger"}
    by_op: Counter[str] = Counter()
    for (_, op, _, _), value in counted.items():
        by_op[op] += value
    # The communicators of both ranks kept their own count of the same calls.
    assert by_op == sum((Counter(r["calls"]["tp"]) for r in planned.reports), Counter())
    assert by_op["all_reduce_rmsnorm"] > 0
    expected = samples(planned.metrics, "sglang_sm120_plan_microseconds")
    assert expected and any(backend == "host" and us > 0 for (_, _, backend, _), us in expected.items())  # fmt: skip


def test_measured_choices_change_no_text(planned):
    assert planned.texts == planned.expected
