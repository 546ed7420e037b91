"""Count the sums of every kind of forward pass, and say the numbers where people and tests look for them.

Counted on the host: under CUDA graphs a sum is counted when its graph is captured ("capture"), and replays
count as passes only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from sglang.srt.plugins.hook_registry import HookType

from sglang_sm120.hooks import session as sessions
from sglang_sm120.hooks.contract import Binding, Part, Target

logger = logging.getLogger("sglang_sm120")

# Passes of the target model between two log lines.
LOG_EVERY = 500
# Passes of the target model after which every lazy compilation of a first use is over.
WARM_PASSES = 8
WRITE_EVERY_S = 0.5


class Sum(str, Enum):
    """How one sum over ranks was done."""

    FUSED_ATTENTION = "fused_attention_sum"
    FUSED_FFN = "fused_ffn_sum"
    PLAIN = "plain"
    SGLANG = "sglang"  # SGLang's own custom all-reduce, where it takes what we do not
    GLOO = "gloo"


class Census:
    """Counters of one process. Written by the scheduler's thread, read by the reporting thread."""

    def __init__(self) -> None:
        self.forward = "outside"
        self.passes: Counter[str] = Counter()
        self.sums: Counter[tuple[str, Sum]] = Counter()

    @contextlib.contextmanager
    def during(self, forward: str) -> Iterator[None]:
        """Book the sums of this block under one kind of forward pass."""
        before, self.forward = self.forward, forward
        self.passes[forward] += 1
        try:
            yield
        finally:
            self.forward = before

    def note(self, kind: Sum) -> None:
        self.sums[self.forward, kind] += 1

    def report(self) -> dict[str, Any]:
        """Passes, sums, and sums per pass, by kind of forward pass."""
        passes, sums = dict(self.passes), dict(self.sums)
        by_forward: dict[str, dict[str, int]] = {}
        for (forward, kind), count in sums.items():
            by_forward.setdefault(forward, {})[kind.value] = count
        return {
            "passes": passes,
            "sums": by_forward,
            "sums_per_pass": {
                forward: {kind: count / passes[forward] for kind, count in kinds.items()}
                for forward, kinds in by_forward.items()
                if passes.get(forward)
            },
        }


CENSUS = Census()


def forward_kind(forward_batch: Any, is_draft: bool) -> str:
    """Name of a forward pass: verify, decode, extend, idle, ... with "draft_" before the draft model's."""
    mode = forward_batch.forward_mode
    if mode.is_target_verify():
        name = "verify"
    elif mode.is_decode():
        name = "decode"
    elif mode.is_idle():
        name = "idle"
    else:
        name = "extend"
    return f"draft_{name}" if is_draft else name


def count_forward(
    original: Callable[..., Any], self: Any, forward_batch: Any, *a: Any, **k: Any
) -> Any:
    """Around `ModelRunner.forward`."""
    kind = forward_kind(forward_batch, self.is_draft_worker)
    with CENSUS.during(kind):
        output = original(self, forward_batch, *a, **k)
    if not self.is_draft_worker:
        _pass_served()
    return output


def _pass_served() -> None:
    served = sum(n for kind, n in CENSUS.passes.items() if not kind.startswith("draft_"))
    session = sessions.current()
    session.poll()
    if served == WARM_PASSES:
        session.serving()
    if served % LOG_EVERY == 0 and session.tp_rank == 0:
        logger.info("sglang-sm120: %s", msgspec.json.encode(full_report()).decode())


def full_report() -> dict[str, Any]:
    """The census with what serves each group and how many calls each communicator finished."""
    session = sessions.current()
    return {
        "rank": session.tp_rank,
        "groups": {
            name: {"backend": outcome.backend, "world": len(outcome.peers), "why": outcome.reason}
            for name, outcome in dict(session.outcomes).items()
        },
        "plans": {
            adapter.communicator.name: plan.sentence()
            for adapter in list(session.adapters)
            if (plan := getattr(adapter.communicator, "plan", None)) is not None
        },
        "calls": {
            adapter.communicator.name: {
                op.value: n for op, n in dict(adapter.communicator.calls).items()
            }
            for adapter in list(session.adapters)
        },
        **CENSUS.report(),
    }


def start_reporting(stats: str, tp_rank: int, metrics: bool) -> None:
    """Begin to write the report to `stats`.rank<N>, and to count in SGLang's /metrics, from a daemon thread.

    Args:
        stats: path without suffix; empty for no file.
        metrics: whether SGLang serves /metrics (`--enable-metrics`).
    """
    sinks: dict[str, Callable[[], None]] = {}
    if stats:
        path = Path(f"{stats}.rank{tp_rank}").expanduser()
        sinks[f"--sm120-stats {path}"] = _file_sink(path)
    if metrics:
        sinks["/metrics"] = _prometheus_sink(tp_rank)
    if not sinks:
        return

    def loop() -> None:
        said: set[str] = set()
        while True:
            report_once(sinks, said, tp_rank)
            time.sleep(WRITE_EVERY_S)

    threading.Thread(target=loop, daemon=True, name="sm120-census").start()


def report_once(sinks: dict[str, Callable[[], None]], said: set[str], tp_rank: int) -> None:
    """Serve every sink; one that fails is named once in the log, and does not keep the others from theirs."""
    for name, sink in sinks.items():
        try:
            sink()
        except Exception as error:  # a full disk must not freeze /metrics
            if name not in said:
                said.add(name)
                logger.warning(
                    "sglang-sm120: rank %d cannot report to %s now: %s", tp_rank, name, error
                )


def _file_sink(path: Path) -> Callable[[], None]:
    last = b""

    def write() -> None:
        nonlocal last
        text = msgspec.json.encode(full_report())
        if text != last:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Readers must never see half a file.
            part = path.with_name(f".{path.name}.{os.getpid()}")
            part.write_bytes(text)
            part.replace(path)
            last = text

    return write


def _prometheus_sink(tp_rank: int) -> Callable[[], None]:
    # prometheus_client picks its storage at import, from what SGLang set in the environment before the spawn.
    from prometheus_client import Counter as Metric

    sums = Metric(
        "sglang:sm120_sums_total",
        "Sums over ranks, by kind of forward pass and by how they were done.",
        labelnames=("forward", "kind", "tp_rank"),
    )
    passes = Metric(
        "sglang:sm120_passes_total", "Forward passes, by kind.", labelnames=("forward", "tp_rank")
    )
    done: Counter[Any] = Counter()

    def publish() -> None:
        for (forward, kind), count in list(CENSUS.sums.items()):
            sums.labels(forward, kind.value, tp_rank).inc(count - done[forward, kind])
            done[forward, kind] = count
        for forward, count in list(CENSUS.passes.items()):
            passes.labels(forward, tp_rank).inc(count - done[forward])
            done[forward] = count

    return publish


PART = Part(
    "census",
    (
        Binding(
            Target(
                "sglang.srt.model_executor.model_runner.ModelRunner.forward",
                "(self, forward_batch, skip_attn_backend_init=..., pp_proxy_tensors=..., "
                "reinit_attn_backend=..., split_forward_count=...)",
                "tells which kind of forward pass a sum belongs to",
            ),
            HookType.AROUND,
            count_forward,
        ),
    ),
)
