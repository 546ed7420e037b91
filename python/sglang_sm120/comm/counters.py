"""Prometheus counters of what really served calls, by backend and message size."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.plan import Plan

SIZE_CLASSES: Final = (
    (16 << 10, "16KiB"),
    (64 << 10, "64KiB"),
    (256 << 10, "256KiB"),
    (1 << 20, "1MiB"),
)


def size_class(nbytes: int) -> str:
    """The smallest class that holds a message: "16KiB", "64KiB", "256KiB", "1MiB" or "larger"."""
    for limit, name in SIZE_CLASSES:
        if nbytes <= limit:
            return name
    return "larger"


class CallCounters:
    """Counters of one process; SGLang's /metrics shows them when they are made in its registry.

    Calls are labelled with the choice of the plan that served them, so a log or dashboard cannot claim a path
    that did not run. Calls inside a CUDA graph count once per replay where the caller knows replays, else at capture.

    Args:
        registry: the default is the one that SGLang exports (also across processes, when
            PROMETHEUS_MULTIPROC_DIR was set before this module was imported).
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.calls = Counter(
            "sglang_sm120_collective_calls",
            "Collective calls by what served them",
            ["group", "op", "backend", "schedule", "size"],
            registry=registry,
        )
        self.fallbacks = Counter(
            "sglang_sm120_vetoes",
            "Fast paths switched off, by path and origin of the veto",
            ["group", "path", "origin"],
            registry=registry,
        )
        self.expected = Gauge(
            "sglang_sm120_plan_microseconds",
            "Expected time per call of the plan in force, at the widest message of each range",
            ["group", "op", "backend", "schedule", "rows"],
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        # Looking a labelled counter up takes longer than counting.
        self._known: dict[tuple[str, Op, str, str, str], Counter] = {}

    def count(self, plan: Plan, op: Op, rows: int, calls: int = 1) -> None:
        """Count `calls` calls of `rows` rows under the choice that the plan gives them."""
        choice = plan.lookup(op, rows)
        size = size_class(rows * plan.hidden * plan.itemsize)
        key = (plan.group, op, choice.backend, choice.schedule, size)
        known = self._known.get(key)
        if known is None:
            labels = (plan.group, op.value, choice.backend, choice.schedule, size)
            known = self._known[key] = self.calls.labels(*labels)
        known.inc(calls)

    def refuse(self, group: str, path: str, origin: str) -> None:
        """Count a veto that keeps `path` off in `group`."""
        self.fallbacks.labels(group, path, origin).inc()

    def announce(self, plan: Plan) -> None:
        """Export the plan's expected times."""
        for op in {e.op for e in plan.entries}:
            for _, last, c in plan.ranges(op):
                self.expected.labels(plan.group, op.value, c.backend, c.schedule, str(last)).set(
                    c.us
                )


@lru_cache(maxsize=1)
def process_counters() -> CallCounters:
    """The counters of this process, made at first use in the default registry."""
    return CallCounters()
