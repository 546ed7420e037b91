"""Three small NCCL broadcasts after sampled verification, or one sum of ours that carries all three?

    python benchmark/packed_broadcast.py --worlds 2,4 --preload /path/to/libnccl.so.2 --json out.json

Several processes under MPS on one GPU, or a GPU per rank where there are enough. NCCL on one GPU needs 2.30 or newer
(`--preload`). Microseconds per verify pass: median over replays of the maximum over ranks, in graphs of 20, A-B-B-A;
and by the host's clock, called one by one as SGLang does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import allreduce
import typer

REQUESTS, DRAFTS = (1, 8, 32), 4


def main(
    worlds: Annotated[str, typer.Option(help="Numbers of ranks, each a run.")] = "2,4",
    seconds: Annotated[float, typer.Option(help="Bound for one world.")] = 60.0,
    preload: Annotated[str, typer.Option(help="An NCCL that the ranks load first.")] = "",
    out: Annotated[Path | None, typer.Option("--json", help="Where the results go.")] = None,
) -> None:
    """Run every world and print both ways side by side."""
    allreduce.end_on_sigterm()
    results: list[dict[str, Any]] = []
    for world in map(int, worlds.split(",")):
        with allreduce.mps() as env:
            if preload:
                env = {**env, "LD_PRELOAD": preload, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
            env = {**env, "SM120_WORKER": "1"}
            found = allreduce.run_world(world, [], env, seconds, Path(__file__).resolve())
        results += [r for r in found if r["kind"] == "packed"]
    print("one GPU, several processes under MPS, us per sampled verify pass (max over ranks)")
    print(
        f"{'world':>5} {'requests':>8} {'3 broadcasts':>12} {'packed':>8} {'ratio':>6}   host: 3, packed"
    )
    for r in results:
        print(
            f"{r['world']:>5} {r['requests']:>8} {r['nccl_us']:>12.1f} {r['packed_us']:>8.1f} "
            f"{r['packed_us'] / r['nccl_us']:>6.2f}   {r['nccl_host_us']:.0f}, {r['packed_host_us']:.0f}"
        )
    if out:
        out.write_text(json.dumps(results, indent=1) + "\n")
    if len(results) < len(REQUESTS) * len(worlds.split(",")):
        raise typer.Exit(1)  # a rank failed or the bound passed; its errors are above


def worker(number: int, world: int, port: int) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from allreduce_contenders import Native, Nccl, Way
    from allreduce_worker import CALLS, Rank
    from sglang_sm120.comm.share import share_from_rank_0

    rank = Rank(number, world, port)
    native = Native(number, world, rank.exchange, host=False, sweep=False, capacity=1 << 20)
    nccl = Nccl(number, world)
    communicator = native.comm
    for requests in REQUESTS:
        sizes = (requests * DRAFTS, requests * DRAFTS, requests)
        tensors = [torch.arange(n, dtype=torch.int32, device="cuda") - 1 + number for n in sizes]
        expected = [torch.arange(n, dtype=torch.int32, device="cuda") - 1 for n in sizes]

        def broadcasts(tensors: list[torch.Tensor] = tensors) -> None:
            for tensor in tensors:
                dist.broadcast(tensor, src=0, group=nccl.group)

        def packed(tensors: list[torch.Tensor] = tensors) -> None:
            assert share_from_rank_0(communicator, tensors)

        packed()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
        ways = {"nccl": broadcasts, "packed": packed}
        record: dict[str, Any] = {"kind": "packed", "requests": requests}
        graphs = {
            name: rank.capture(Way(name, call, lambda held=tensors: held[0], False))
            for name, call in ways.items()
        }
        seen: dict[str, list[float]] = {name: [] for name in ways}
        for name in (*ways, *reversed(ways)):
            graph = graphs[name]
            assert graph is not None, name
            seen[name].append(rank.time(graph, 30))
        for name, call in ways.items():
            record[f"{name}_us"] = sum(seen[name]) / len(seen[name])
            times = []
            for _ in range(30):
                dist.barrier()
                began = time.perf_counter()
                call()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began) * 1e6)
            record[f"{name}_host_us"] = median(max(t) for t in zip(*rank.exchange(times)))
        rank.say(calls=CALLS, **record)
    rank.leave([native])


if __name__ == "__main__":
    if os.environ.get("SM120_WORKER"):
        worker(*map(int, sys.argv[1:4]))
    else:
        typer.run(main)
