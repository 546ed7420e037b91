"""Does the plugin give the ranks' main threads more to do? From profiler traces of servers that were measured in one run.

    sglang-sm120 demo --gpu --ranks 2 --model kimi-proxy --servers eagle3,plugin --turns 2 --logs LOGS
    python benchmark/host_work.py LOGS/*.traces --baseline eagle3,compact

Serving of a small model waits for the slowest host, and the cores of a shared machine differ by more than the servers do.
So each rank's work per verify pass stands beside its processor's pace: the time of operators that touch no GPU, over
that of the fastest rank of the run. A straight line through the ranks of the baseline (least squares; part of the work,
such as system calls, does not follow the pace) says what a rank of that pace would have to do without the plugin.

Work is the time of the thread with most operators: in operators and in CUDA calls other than synchronisation, and in the
gaps between them, which are Python, below 0.3 ms. Longer gaps are waits for the GPU or for another process.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy
import typer
from rich.console import Console
from rich.table import Table
from sglang_sm120.verify.pace import common_operators, times_as_slow
from sglang_sm120.verify.trace import load_events, rank_of, trace_of

WAIT_US = 300.0
HOST = ("cpu_op", "cuda_runtime", "cuda_driver")


@dataclass
class Host:
    """One rank of one server.

    Attributes:
        work_ms: of the main thread per verify pass.
        pace: how many times as slow as the fastest rank of the run.
        over_baseline: work over what the baseline's line says for this pace.
    """

    server: str
    rank: int
    work_ms: float
    pace: float = 0.0
    over_baseline: float = 0.0


def work_us(events: list[dict[str, Any]]) -> float:
    """Microseconds that the main thread worked."""
    host = [e for e in events if e.get("cat") in HOST]
    main = Counter((e["pid"], e["tid"]) for e in host if e["cat"] == "cpu_op").most_common(1)[0][0]
    own = [e for e in host if (e["pid"], e["tid"]) == main]
    worked, end = 0.0, None
    for e in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
        if end is not None and e["ts"] < end:
            continue  # inside an operator that was counted
        if end is not None and e["ts"] - end < WAIT_US:
            worked += e["ts"] - end
        if "Synchronize" not in e["name"]:
            worked += e["dur"]
        end = e["ts"] + e["dur"]
    return worked


def read(folders: list[Path]) -> list[Host]:
    """Every rank of every folder; a folder is named after its server, with a number for a later turn."""
    hosts, seen = [], []
    for folder in folders:
        files = sorted(folder.rglob("*.json.gz"))
        if not files:
            raise typer.BadParameter(f"{folder} holds no *.json.gz trace")
        for index, path in enumerate(files):
            events = load_events(path)
            trace = trace_of(events, path, rank=rank_of(path, index))
            passes = sum(p.kind == "VERIFY" for p in trace.passes)
            if not passes:
                raise typer.BadParameter(f"{path} holds no verify pass")
            server = re.sub(r"-\d+$", "", folder.name.removesuffix(".traces"))
            hosts.append(Host(server, trace.rank, work_us(events) / passes / 1000))
            seen.append(trace.paces)
    common = common_operators(seen)
    if not common:
        raise typer.BadParameter("the traces have no common operators that touch no GPU")
    for host, pace in zip(hosts, times_as_slow(seen, common), strict=True):
        host.pace = pace
    return hosts


def gpu_of(folder: Path) -> str:
    """The GPU of a folder's first trace, as the profiler noted it."""
    path = sorted(folder.rglob("*.json.gz"))[0]
    noted = json.loads(gzip.decompress(path.read_bytes())).get("deviceProperties") or [{}]
    return str(noted[0].get("name", "unknown GPU"))


def main(
    folders: Annotated[list[Path], typer.Argument(help="Traces of one server each, NAME.traces.")],
    baseline: Annotated[str, typer.Option(help="Servers without our kernels.")] = "eagle3",
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Print each rank's work and pace, and each server's work over the baseline's at equal pace."""
    hosts = read(folders)
    base = [h for h in hosts if h.server in baseline.split(",")]
    if len({h.pace for h in base}) < 2:
        raise typer.BadParameter(
            f"{baseline} needs two ranks or more of different pace to compare with"
        )
    slope, start = numpy.polyfit([h.pace for h in base], [h.work_ms for h in base], 1)
    for h in hosts:
        h.over_baseline = h.work_ms / (start + slope * h.pace)
    ranks = 1 + max(h.rank for h in hosts)
    rig = f"{ranks} ranks on {gpu_of(folders[0])}, {len(folders)} servers, traced"
    table = Table(title=f"work of the ranks' main threads per verify pass ({rig})")
    for column in ("server", "rank", "pace", "work, ms", f"over {baseline} at this pace"):
        table.add_column(column)
    for h in hosts:
        table.add_row(h.server, str(h.rank), f"{h.pace:.2f}", f"{h.work_ms:.2f}", f"{h.over_baseline:.3f}")  # fmt: skip
    console = Console(width=120)
    console.print(table)
    medians = {
        name: statistics.median(h.over_baseline for h in hosts if h.server == name)
        for name in dict.fromkeys(h.server for h in hosts)
    }
    for name, ratio in medians.items():
        console.print(f"{name}: {ratio:.3f} of {baseline} at equal pace (median over ranks)")
    if out:
        figures = {
            "rig": rig,
            "line_ms": {"start": start, "slope": slope},
            "median_over_baseline": medians,
            "ranks": [asdict(h) for h in hosts],
        }
        out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
