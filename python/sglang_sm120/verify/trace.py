"""Read a torch-profiler (Chrome) trace: device work, the passes it belongs to, and what each kernel is."""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_sm120.verify import pace

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")

# A pass without annotations must launch this many kernels at once to be told from glue.
GRAPH_KERNELS = 16
# Without graphs either, a pause of this many microseconds between kernels separates passes.
PAUSE_US = 2000.0
NESTED = 4

_BYTES = {
    "BFloat16": 2,
    "Half": 2,
    "Float": 4,
    "Double": 8,
    "Int": 4,
    "Long": 8,
    "Byte": 1,
    "Char": 1,
}

# (pattern, operation, who): the first match names a kernel that moves data between ranks.
_COMMUNICATION: tuple[tuple[re.Pattern[str], str, str], ...] = tuple(
    (re.compile(pattern), operation, who)
    for pattern, operation, who in (
        (r"sm120.*(flat|general|relay)_kernel", "all-reduce", "sm120"),
        (r"nccl\w*AllReduce", "all-reduce", "NCCL"),
        (r"nccl\w*AllGather", "all-gather", "NCCL"),
        (r"nccl\w*ReduceScatter", "reduce-scatter", "NCCL"),
        (r"nccl\w*Broadcast", "broadcast", "NCCL"),
        (r"nccl\w*(SendRecv|AllToAll)", "send/receive", "NCCL"),
        (r"nccl", "other", "NCCL"),
        (r"allreduce_fusion|trtllm_\w*all_?reduce", "all-reduce", "FlashInfer"),
        (r"pcie_ipc|pcie\w*all_?reduce", "all-reduce", "SGLang PCIe IPC"),
        (r"cross_device_reduce|all_reduce_[12]shot|moe_finalize_all_reduce", "all-reduce", "SGLang custom"),
        (r"multimem_all_reduce|(one|two)_shot_all_reduce", "all-reduce", "torch symmetric memory"),
        (r"mscclpp|allreduce\d_", "all-reduce", "MSCCL++"),
        (r"sm120:all_reduce", "all-reduce", "sm120"),
        (r"gloo:all_?reduce", "all-reduce", "gloo"),
        (r"gloo:all_?gather", "all-gather", "gloo"),
        (r"gloo:broadcast", "broadcast", "gloo"),
        (r"(?i)all_?reduce", "all-reduce", "other"),
        (r"(?i)all_?gather", "all-gather", "other"),
    )
)  # fmt: skip
# What a CPU server records about a collective, and operators that only call one.
_COLLECTIVES = ("gloo:", "sm120:")
_DELEGATES = re.compile(r"^(sglang|c10d)::")
_NORM = re.compile(r"(?i)rms_?norm")
_STEP = re.compile(r"^step\[(\w+) bs=(\d+)")


class TraceError(ValueError):
    """The file is no trace, or holds nothing to analyse; the text says what was found."""


@dataclass(frozen=True)
class Work:
    """One piece of device work.

    Attributes:
        start, end: microseconds on the trace's clock.
        operation: "all-reduce", "all-gather", ... for communication, "" for anything else.
        who: library of a communication kernel.
        bytes: message size when the trace has it, else 0.
        norm: whether it is an RMSNorm kernel.
    """

    name: str
    start: float
    end: float
    stream: int
    operation: str
    who: str
    bytes: int
    norm: bool

    @property
    def us(self) -> float:
        return self.end - self.start


@dataclass
class Pass:
    """Device work of one forward step.

    Attributes:
        kind: SGLang's name of the step ("VERIFY", "DECODE", "DRAFT", "EXTEND"), or "GRAPH" / "RUN".
        batch: requests, 0 when the trace does not say.
        work: ascending by start.
    """

    kind: str
    batch: int
    work: list[Work]

    @property
    def start(self) -> float:
        return self.work[0].start

    @property
    def end(self) -> float:
        return max(w.end for w in self.work)


@dataclass
class RankTrace:
    """Passes of one rank, and how long cheap host operators took (see `pace`)."""

    rank: int
    passes: list[Pass] = field(default_factory=list)
    paces: dict[str, float] = field(default_factory=dict)


def _classify(name: str) -> tuple[str, str]:
    for pattern, operation, who in _COMMUNICATION:
        if pattern.search(name):
            return operation, who
    return "", ""


def _message_bytes(args: dict[str, Any]) -> int:
    """Size of an eager NCCL call; captured graphs do not keep it."""
    elements = args.get("In msg nelems", 0)
    return int(elements) * _BYTES.get(str(args.get("dtype", "")), 0)


def _work(event: dict[str, Any]) -> Work:
    args = event.get("args") or {}
    operation, who = _classify(event["name"])
    return Work(
        name=event["name"],
        start=float(event["ts"]),
        end=float(event["ts"]) + float(event["dur"]),
        stream=int(args.get("stream", 0)),
        operation=operation,
        who=who,
        bytes=_message_bytes(args) if operation else 0,
        norm=bool(_NORM.search(event["name"])) and not operation,
    )


def load_events(path: Path) -> list[dict[str, Any]]:
    """Complete events (ph "X") of a .json or .json.gz trace.

    Raises:
        TraceError: not a Chrome trace.
        OSError: the file cannot be read.
    """
    raw = path.read_bytes()
    try:
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = data["traceEvents"] if isinstance(data, dict) else data
        return [e for e in events if e.get("ph") == "X" and "dur" in e]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{path} is not a Chrome trace ({type(error).__name__}: {error})"
        ) from None


def rank_of(path: Path, fallback: int) -> int:
    """Rank in SGLang's file names (`...-TP-3...trace.json.gz`)."""
    found = re.search(r"-TP-(\d+)", path.name)
    return int(found.group(1)) if found else fallback


def read_trace(path: Path, *, rank: int = 0) -> RankTrace:
    """Read one rank's trace and split its device work into passes, see `trace_of`.

    Raises:
        TraceError: no device work, or not a trace.
    """
    return trace_of(load_events(path), path, rank=rank)


def trace_of(events: list[dict[str, Any]], path: Path, *, rank: int = 0) -> RankTrace:
    """Split the device work of a trace's events into passes; `path` is for the error's text.

    Passes are found, in this order, by SGLang's step annotations through the launches inside them, by
    the annotations on the device's own time line, by graph launches, and by pauses.

    Raises:
        TraceError: no device work.
    """
    device = [e for e in events if e.get("cat") in DEVICE_WORK]
    if not device:
        passes = _host_passes(events)
        if passes:
            return RankTrace(rank, passes, pace.paces(events))
        raise TraceError(
            f"{path} has {len(events)} events but no GPU kernels and no SGLang steps; profile with "
            'activities ["CPU", "GPU"] while requests are being served'
        )
    by_launch = _by_launch_spans(events, device)
    passes = by_launch or _by_device_spans(events, device) or _by_graph(device) or _by_pause(device)
    passes.sort(key=lambda p: p.start)
    return RankTrace(rank, passes, pace.paces(events))


def _steps(
    events: Iterable[dict[str, Any]], category: str
) -> list[tuple[float, float, str, int, Any]]:
    """(start, end, kind, batch, thread) of step annotations, outermost ones only."""
    found = []
    for e in events:
        if e.get("cat") == category and (match := _STEP.match(e["name"])):
            thread = (e.get("pid"), e.get("tid"))
            found.append((e["ts"], e["ts"] + e["dur"], match.group(1), int(match.group(2)), thread))
    return sorted(found, key=lambda s: s[0])


def _assign(
    steps: Sequence[tuple[float, float, str, int, Any]],
    items: Iterable[tuple[float, Any, dict[str, Any]]],
    *,
    same_thread: bool,
) -> list[Pass]:
    buckets: dict[int, list[Work]] = {}
    starts = [s[0] for s in steps]
    for at, thread, event in items:
        latest = bisect_right(starts, at) - 1
        # Spans hardly nest: the step that contains a moment is among the last few that began.
        for index in range(latest, max(-1, latest - NESTED), -1):
            if at <= steps[index][1] and (not same_thread or steps[index][4] == thread):
                buckets.setdefault(index, []).append(_work(event))
                break
    return [
        Pass(steps[i][2], steps[i][3], sorted(work, key=lambda w: w.start))
        for i, work in sorted(buckets.items())
    ]


def _by_launch_spans(events: list[dict[str, Any]], device: list[dict[str, Any]]) -> list[Pass]:
    steps = _steps(events, "user_annotation")
    if not steps:
        return []
    launches = {
        e["args"]["correlation"]: (e["ts"], (e.get("pid"), e.get("tid")))
        for e in events
        if e.get("cat") in LAUNCHES and "correlation" in (e.get("args") or {})
    }
    items = []
    for e in device:
        launch = launches.get((e.get("args") or {}).get("correlation"))
        if launch is not None:
            items.append((launch[0], launch[1], e))
    return _assign(steps, items, same_thread=True)


def _by_device_spans(events: list[dict[str, Any]], device: list[dict[str, Any]]) -> list[Pass]:
    steps = _steps(events, "gpu_user_annotation")
    return _assign(steps, ((e["ts"], None, e) for e in device), same_thread=False) if steps else []


def _by_graph(device: list[dict[str, Any]]) -> list[Pass]:
    groups: dict[Any, list[Work]] = {}
    for e in device:
        groups.setdefault((e.get("args") or {}).get("correlation"), []).append(_work(e))
    return [
        Pass("GRAPH", 0, sorted(work, key=lambda w: w.start))
        for key, work in groups.items()
        if key is not None and len(work) >= GRAPH_KERNELS
    ]


def _by_pause(device: list[dict[str, Any]]) -> list[Pass]:
    work = sorted((_work(e) for e in device), key=lambda w: w.start)
    passes = [Pass("RUN", 0, [work[0]])]
    end = work[0].end
    for item in work[1:]:
        if item.start - end > PAUSE_US:
            passes.append(Pass("RUN", 0, []))
        passes[-1].work.append(item)
        end = max(end, item.end)
    return passes


def _host_passes(events: list[dict[str, Any]]) -> list[Pass]:
    """Passes of a CPU server: outermost operators of the step's thread, collectives' own events anywhere."""
    steps = _steps(events, "user_annotation")
    items: list[tuple[float, Any, dict[str, Any]]] = []
    covered: dict[Any, float] = {}
    operators = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    threads = {s[4] for s in steps}
    for e in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        thread = (e.get("pid"), e.get("tid"))
        if e["name"].startswith(_COLLECTIVES):
            items.append((e["ts"], None, e))
        elif _DELEGATES.search(e["name"]):
            continue
        elif e["cat"] == "cpu_op" and thread in threads and e["ts"] >= covered.get(thread, -1.0):
            covered[thread] = e["ts"] + e["dur"]
            items.append((e["ts"], None, e))
    return _assign(steps, items, same_thread=False) if steps else []
