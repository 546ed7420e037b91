"""What compact NCCL settings save and cost: device memory of one communicator, and all-reduce latency in CUDA graphs.

    python benchmark/nccl_memory.py --worlds 2,4 --preload /path/to/libnccl.so.2 --json out.json

Several ranks on one GPU need NCCL 2.30 or newer (`--preload`, where torch's is older) and MPS, which this starts. Memory
is the device's free memory before a communicator is made and after it has summed every size, over the ranks, with
kernels loaded by a communicator before it. Latency compares communicators of one process in turns. LL128 is left out,
as NCCL itself does over PCIe.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from allreduce import mps, run_world
from rich.console import Console
from rich.table import Table

ROWS, HIDDEN = (1, 4, 16, 64), 7168
ROUNDS, REPLAYS = 9, 20
# max_ctas of the communicators compared; None is NCCL's own choice.
LIMITS: tuple[int | None, ...] = (None, 16, 8, 4, 2)
MIB = 1 << 20


def worker(rank_id: int, world: int, port: int, label: str) -> None:
    """One rank: make each communicator in turn, measure, then time them against each other."""
    import torch
    import torch.distributed as dist
    from allreduce_worker import Rank

    rank = Rank(rank_id, world, port)
    inputs = {rows: torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda") for rows in ROWS}

    def communicator(limit: int | None) -> Any:
        options = dist.ProcessGroupNCCL.Options()
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

    keep = communicator(None)  # loads the kernels
    groups = {}
    for limit in LIMITS:
        before = free()
        groups[limit] = communicator(limit)
        taken = (before - free()) / world
        rank.say(kind="memory", label=label, limit=limit, mib=round(taken / MIB, 2))
    for rows, x in inputs.items():
        graphs = {}
        for limit, group in groups.items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(rank.stream):
                dist.all_reduce(x, group=group)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=rank.stream):
                for _ in range(20):
                    dist.all_reduce(x, group=group)
            graphs[limit] = graph
        seen: dict[int | None, list[float]] = {limit: [] for limit in groups}
        for turn in range(ROUNDS):
            order = list(graphs) if turn % 2 else list(graphs)[::-1]
            for limit in order:
                seen[limit].append(rank.time(graphs[limit], REPLAYS))
        for limit, times in seen.items():
            rank.say(
                kind="latency", label=label, rows=rows, limit=limit, us=round(statistics.median(times), 3),
                ratio=round(statistics.median(a / b for a, b in zip(times, seen[None], strict=True)), 4),
            )  # fmt: skip
    del keep
    rank.say(kind="done", label=label)
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # NCCL's own teardown of ranks on one GPU may wait for ranks that have left


def main(
    worlds: Annotated[str, typer.Option(help="Numbers of ranks, each two runs.")] = "2,4",
    preload: Annotated[str, typer.Option(help="NCCL library for the ranks.")] = "",
    seconds: Annotated[float, typer.Option(help="Bound for one run.")] = 60.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the results go.")] = None,
) -> None:
    """Measure communicators with NCCL's defaults and with ours."""
    from sglang_sm120.nccl.environment import settings

    results: list[dict[str, Any]] = []
    for world in map(int, worlds.split(",")):
        for label, added in (("default", {}), ("compact", settings({}, pcie_only=True))):
            with mps() as env:
                ranks = {
                    **env, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_PROTO": "^LL128", **added,
                    **({"LD_PRELOAD": preload} if preload else {}),
                }  # fmt: skip
                results += run_world(world, [label], ranks, seconds, Path(__file__).resolve())
    console = Console(width=120)
    for world in sorted({r["world"] for r in results}):
        console.print(_table(world, [r for r in results if r["world"] == world]))
    if json_path is not None:
        title = "NCCL communicators, one GPU, several processes under MPS, bf16, hidden 7168"
        json_path.write_text(json.dumps({"title": title, "results": results}, indent=1))


def _table(world: int, results: list[dict[str, Any]]) -> Table:
    from sglang_sm120.nccl.memory import Buffers, communicator_bytes

    table = Table(
        title=f"NCCL, {world} ranks on one GPU (MPS): device memory per communicator and rank, us per all-reduce in "
        "graphs (over NCCL's default in the same process)"
    )
    for column in (
        "environment",
        "max_ctas",
        "MiB",
        "MiB by formula",
        *(f"{r} rows" for r in ROWS),
    ):
        table.add_column(column, justify="right")
    buffers = {"default": Buffers(), "compact": Buffers(ll128=256 << 10)}
    for found in (r for r in results if r["kind"] == "memory"):
        label, limit = found["label"], found["limit"]
        times = {
            r["rows"]: f"{r['us']:.1f} ({r['ratio']:.3f})"
            for r in results
            if r["kind"] == "latency" and (r["label"], r["limit"]) == (label, limit)
        }
        formula = f"{communicator_bytes(limit, buffers[label]) / MIB:.0f}" if limit else "-"
        table.add_row(
            label, str(limit or "NCCL's"), f"{found['mib']:.1f}", formula, *(times.get(r, "-") for r in ROWS)
        )  # fmt: skip
    return table


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1].isdecimal():
        worker(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        typer.run(main)
