"""Is the plan's choice the best one? Probe and plan, start again from the cache, then time every candidate anew.

    python benchmark/plan_quality.py --rig host --ranks 2            # host engine against gloo, on any CPU
    python benchmark/plan_quality.py --rig gpu --ranks 8             # native kernels against NCCL, one GPU per rank
    python benchmark/plan_quality.py --rig gpu --ranks 4 --one-gpu   # under MPS; NCCL_MULTI_RANK_GPU_ENABLE=1 for NCCL

Prints seconds of the first and second start, and per operation and rows the plan's choice over the best candidate,
both timed after the plan was made. Writes JSON with --out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from sglang_sm120.comm import start
from sglang_sm120.comm.communicator import Communicator, Op
from sglang_sm120.comm.plan import BASELINE
from sglang_sm120.fabric.islands import flat
from sglang_sm120.fabric.versions import installed

OPS = (Op.ALL_REDUCE, Op.ALL_REDUCE_RMSNORM)


def communicator(rig: str, rank: int, world: int, session: str, exchange: Any) -> Communicator:
    """The backend under test."""
    if rig == "host":
        from sglang_sm120.comm.host import HostCommunicator

        return HostCommunicator("tp", rank, world, session=session)
    from sglang_sm120.comm.native import NativeCommunicator

    return NativeCommunicator(
        "tp", rank, world, exchange, capacity_bytes=8 << 20, timeout_ms=20_000
    )


def rank_main(rank: int, args: argparse.Namespace, folder: str, out: Any) -> None:
    """One rank: two starts, then every candidate timed again."""
    world = args.ranks
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.rig == "gpu":
        device = torch.device("cuda", 0 if args.one_gpu else rank)
        torch.cuda.set_device(device)
    init = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=init)
    # NCCL sums GPU tensors; gloo is both the exchange and the CPU's baseline.
    sums = dist.new_group(backend="nccl") if args.rig == "gpu" else None

    def exchange(mine: Any) -> list[Any]:
        told: list[Any] = [None] * world
        dist.all_gather_object(told, mine)
        return told

    def driver() -> Any:
        if args.rig == "gpu":
            return start.gpu_edges(rank, world, exchange, device)()
        from sglang_sm120.fabric.host_driver import HostDriver

        return HostDriver.join(rank, world, f"quality{os.getppid()}", exchange)

    baseline = start.Baseline(lambda x: dist.all_reduce(x, group=sums))

    backend = "host" if args.rig == "host" else "native"
    setting = start.Setting(
        gpus=tuple(f"rank{r}" for r in range(world)),
        hosts=("here",) * world,
        versions=installed(),
        islands=flat(world),
        cache=Path(folder) / "plans",
    )
    session = f"quality{os.getppid()}"
    inner = communicator(args.rig, rank, world, session, exchange)
    dtype = torch.bfloat16
    starts = []
    for _ in range(2):
        ours = start.planned(
            inner,
            backend,
            setting,
            device=device,
            exchange=exchange,
            baseline=baseline,
            driver=driver,
        )
        dist.barrier()
        begin = time.monotonic()
        ours.prepare(args.hidden, dtype, args.rows)
        starts.append(time.monotonic() - begin)
    plan = ours.plan
    assert plan is not None
    request = start.Request(
        group="tp", world=world, hidden=args.hidden, itemsize=2, rows=start.rows_up_to(args.rows)
    )
    again: dict[str, dict[str, float]] = {}
    for c in start.candidates_of(inner, backend, request, flat(world), dtype, device, baseline):
        for op in OPS:
            for rows in request.rows:
                again.setdefault(f"{op.value} {rows}", {})[c.choice.name] = _slowest(
                    c.time, op, rows, exchange
                )
    chosen = {
        f"{op.value} {rows}": plan.lookup(op, rows).name for op in OPS for rows in request.rows
    }
    if rank == 0:
        out.send({"starts": starts, "again": again, "chosen": chosen, "plan": plan.digest()})
    exchange(None)
    inner.close()
    dist.destroy_process_group()


def _slowest(timed: Callable[[Op, int], float] | None, op: Op, rows: int, exchange: Any) -> float:
    assert timed is not None
    return float(max(exchange(timed(op, rows))))


def main() -> None:
    """Start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rig", choices=("host", "gpu"), default="host")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(r, args, folder, theirs))
            for r in range(args.ranks)
        ]
        for p in ranks:
            p.start()
        if not mine.poll(600):
            for p in ranks:
                p.kill()
            raise SystemExit("the ranks did not answer within 600 s; their errors are above")
        got = mine.recv()
        for p in ranks:
            p.join(30)
    where = "one GPU" if args.one_gpu else "GPUs" if args.rig == "gpu" else "host engine, this CPU"
    table = Table(
        title=f"plan against the best candidate timed afterwards ({args.ranks} ranks, {where})"
    )
    for column in ("operation, rows", "plan's choice", "us", "best", "us", "ratio", "baseline us"):
        table.add_column(column)
    worst = 1.0
    for key, times in got["again"].items():
        name = got["chosen"][key]
        best = min(times, key=lambda n: times[n])
        ratio = times[name] / times[best]
        worst = max(worst, ratio)
        base = times.get(BASELINE, float("nan"))
        table.add_row(
            key,
            name,
            f"{times[name]:.1f}",
            best,
            f"{times[best]:.1f}",
            f"{ratio:.2f}",
            f"{base:.1f}",
        )
    console = Console()
    console.print(table)
    first, second = got["starts"]
    console.print(f"first start {first:.2f} s, second {second:.2f} s; worst ratio {worst:.2f}")
    if args.out:
        title = f"plan quality, {args.ranks} ranks, {where}"
        args.out.write_text(json.dumps({"title": title, "worst_ratio": worst, **got}, indent=1))


if __name__ == "__main__":
    main()
