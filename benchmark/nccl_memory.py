"""What compact NCCL settings save and cost: device memory of one communicator, and all-reduce latency in CUDA graphs.

    python benchmark/nccl_memory.py --worlds 2,4 --preload /path/to/libnccl.so.2 --json out.json

Communicators for CUDA graphs get the channels of their widest batch (`sglang_sm120.nccl.config`): each is timed up to that
many rows against NCCL's own choice, in turns, in one process. Memory is the device's free memory before a communicator is
made and after it has summed every size, over the ranks, with kernels loaded by a communicator before it. Two
environments: NCCL's, and with the plugin's buffer sizes. LL128 is left out, as NCCL itself does over PCIe.

Several ranks on one GPU need NCCL 2.30 or newer (`--preload`, where torch's is older) and MPS, which this starts. From four
ranks on, "NCCL's own choice" is 32 channels: with 64 the CTAs of all ranks are not resident at once, and they wait for ever.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from allreduce import end_on_sigterm, mps, run_world
from rich.console import Console
from rich.table import Table

ROWS, HIDDEN = (1, 4, 16, 64), 7168
ROUNDS, REPLAYS = 9, 20
OWN = "NCCL's own"
MIB = 1 << 20


def limits(world: int) -> dict[str, int | None]:
    """Communicator -> its max_ctas; None is no limit."""
    from sglang_sm120.nccl.config import config_for

    most = None if world == 2 else 32
    out: dict[str, int | None] = {OWN: most}
    for rows in ROWS:
        fields = config_for("tp", captured=True, widest_bytes=rows * HIDDEN * 2, world=world)
        out[f"graphs up to {rows} rows"] = min(int(fields["max_ctas"]), most or 64)
    out["eager"] = int(config_for("tp")["max_ctas"])
    return out


def worker(rank_id: int, world: int, port: int, label: str) -> None:
    """One rank: make each communicator in turn, measure, then time them against each other."""
    import torch
    import torch.distributed as dist
    from allreduce_worker import Rank

    rank = Rank(rank_id, world, port)
    inputs = {rows: torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda") for rows in ROWS}

    def communicator(limit: int | None) -> Any:
        options: Any = dist.ProcessGroupNCCL.Options()
        if limit is not None:
            options.config.max_ctas = limit
        made = dist.new_group(backend="nccl", pg_options=options)
        for x in inputs.values():
            dist.all_reduce(x, group=made)
        torch.cuda.synchronize()
        return made

    def free() -> int:
        torch.cuda.synchronize()
        dist.barrier()
        left = torch.cuda.mem_get_info()[0]
        dist.barrier()
        return int(left)

    all_limits = limits(world)
    keep = communicator(all_limits[OWN])  # loads the kernels
    groups = {}
    for name, limit in all_limits.items():
        before = free()
        groups[name] = communicator(limit)
        taken = (before - free()) / world
        rank.say(kind="memory", label=label, name=name, limit=limit, mib=round(taken / MIB, 2))
    for rows, x in inputs.items():
        graphs = {}
        for name, group in groups.items():
            if name.startswith("graphs") and int(name.split()[3]) < rows:
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(rank.stream):
                dist.all_reduce(x, group=group)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=rank.stream):
                for _ in range(20):
                    dist.all_reduce(x, group=group)
            graphs[name] = graph
        seen: dict[str, list[float]] = {name: [] for name in graphs}
        for turn in range(ROUNDS):
            for name in list(graphs) if turn % 2 else list(graphs)[::-1]:
                seen[name].append(rank.time(graphs[name], REPLAYS))
        for name, times in seen.items():
            rank.say(
                kind="latency", label=label, rows=rows, name=name, us=round(statistics.median(times), 3),
                ratio=round(statistics.median(a / b for a, b in zip(times, seen[OWN], strict=True)), 4),
            )  # fmt: skip
    del keep
    rank.leave([], label=label)


def main(
    worlds: Annotated[str, typer.Option(help="Numbers of ranks, each two runs.")] = "2,4",
    preload: Annotated[str, typer.Option(help="NCCL library for the ranks.")] = "",
    seconds: Annotated[float, typer.Option(help="Bound for one run.")] = 60.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the results go.")] = None,
) -> None:
    """Measure communicators with NCCL's defaults and with ours."""
    from sglang_sm120.nccl.environment import settings

    end_on_sigterm()
    results: list[dict[str, Any]] = []
    for world in map(int, worlds.split(",")):
        for label, added in (("default", {}), ("compact", settings({}, pcie_only=True))):
            with mps() as env:
                ranks = {
                    **env, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_PROTO": "^LL128", **added,
                    **({"LD_PRELOAD": preload} if preload else {}),
                }  # fmt: skip
                results += run_world(world, [label], ranks, seconds, Path(__file__).resolve())
    console = Console(width=150)
    for world in sorted({r["world"] for r in results}):
        console.print(_table(world, [r for r in results if r["world"] == world]))
    if json_path is not None:
        title = "NCCL communicators, one GPU, several processes under MPS, bf16, hidden 7168"
        json_path.write_text(json.dumps({"title": title, "results": results}, indent=1))


def _table(world: int, results: list[dict[str, Any]]) -> Table:
    from sglang_sm120.nccl.memory import Buffers, communicator_bytes

    table = Table(
        title=f"NCCL, {world} ranks on one GPU (MPS): device memory per communicator and rank, and us per all-reduce in "
        "graphs (over NCCL's own choice in the same process)"
    )
    columns = (
        "environment",
        "communicator",
        "max_ctas",
        "MiB",
        "MiB by formula",
        *(f"{r} rows" for r in ROWS),
    )
    for column in columns:
        table.add_column(column, justify="right")
    buffers = {"default": Buffers(), "compact": Buffers(ll128=256 << 10)}
    for found in (r for r in results if r["kind"] == "memory"):
        label, name, limit = found["label"], found["name"], found["limit"]
        times = {
            r["rows"]: f"{r['us']:.1f} ({r['ratio']:.3f})"
            for r in results
            if r["kind"] == "latency" and (r["label"], r["name"]) == (label, name)
        }
        formula = f"{communicator_bytes(limit, buffers[label]) / MIB:.0f}" if limit else "-"
        cells = (times.get(rows, "-") for rows in ROWS)
        table.add_row(label, name, str(limit or "-"), f"{found['mib']:.1f}", formula, *cells)
    return table


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1].isdecimal():
        worker(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        typer.run(main)
