"""Is the plan's choice the best one? Probe and plan, time every candidate anew, then start again in new processes.

    python benchmark/plan_quality.py --rig host --ranks 2            # host engine against gloo, on any CPU
    python benchmark/plan_quality.py --rig gpu --ranks 8             # native kernels against NCCL, one GPU per rank
    python benchmark/plan_quality.py --rig gpu --ranks 4 --one-gpu   # under MPS, which it starts; NCCL 2.30 or newer

Prints per operation and rows the plan's choice over the best candidate, both timed after the plan was made; seconds
of the first and the second start, whether the second used the kept plan, and what the log said of both. Writes JSON
with --out.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from allreduce import end_on_sigterm, mps
from rich.console import Console
from rich.table import Table
from sglang_sm120.comm import start
from sglang_sm120.comm.candidates import Baseline, candidates_of, operations
from sglang_sm120.comm.choosing import HANDICAP
from sglang_sm120.comm.communicator import Communicator, Op
from sglang_sm120.comm.dispatch import PlannedCommunicator
from sglang_sm120.comm.plan import BASELINE
from sglang_sm120.fabric.islands import flat
from sglang_sm120.fabric.versions import installed

ROUNDS = 3  # of timing every candidate again, there and back
STUCK_S = 8  # after which a rank that does not come back from one timing prints where it is
KEPT = "kept from an earlier start"  # the log's words for a plan from the cache


def communicator(rig: str, rank: int, world: int, session: str, exchange: Any) -> Communicator:
    """The backend under test."""
    if rig == "host":
        from sglang_sm120.comm.host import HostCommunicator

        return HostCommunicator("tp", rank, world, session=session)
    from sglang_sm120.comm.native import NativeCommunicator

    return NativeCommunicator(
        "tp", rank, world, exchange, capacity_bytes=8 << 20, timeout_ms=20_000
    )


def flashinfer(rank: int, world: int, exchange: Any, shared_gpu: bool) -> Communicator | None:
    """FlashInfer's kernels beside ours, where they are compiled on every rank."""
    from sglang_sm120.comm.flashinfer import TRTLLM_WORLDS, FlashInferCommunicator, Modules

    modules = Modules.common(exchange(Modules.found()))
    if world not in TRTLLM_WORLDS or not (modules.pcie or modules.trtllm):
        return None
    return FlashInferCommunicator(
        "tp", rank, world, dist.group.WORLD, exchange, modules=modules, shared_gpu=shared_gpu
    )


def _import_flashinfer() -> float:
    """Import what SGLang imports anyway before it makes groups; seconds."""
    begin = time.monotonic()
    with contextlib.suppress(ImportError):
        importlib.import_module("flashinfer.comm")
    return time.monotonic() - begin


class Said(logging.Handler):
    """Keeps what the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def rank_main(rank: int, args: argparse.Namespace, folder: str, out: Any, first: bool) -> None:
    """One rank of one start; in the first, every candidate is timed again afterwards."""
    said = Said()
    logging.getLogger("sglang_sm120").addHandler(said)
    logging.getLogger("sglang_sm120").setLevel(logging.INFO)
    world = args.ranks
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.rig == "gpu":
        device = torch.device("cuda", 0 if args.one_gpu else rank)
        torch.cuda.set_device(device)
    init = f"file://{folder}/rendezvous-{'first' if first else 'second'}"
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=init)
    # NCCL sums GPU tensors; gloo is both the exchange and the CPU's baseline.
    sums = dist.new_group(backend="nccl") if args.rig == "gpu" else None

    def exchange(mine: Any) -> list[Any]:
        told: list[Any] = [None] * world
        dist.all_gather_object(told, mine)
        return told

    session = f"quality{os.getppid()}"
    driver = start.host_edges(rank, world, exchange, session)
    extras: dict[str, start.Extra] = {}
    if args.rig == "gpu":
        driver = start.gpu_edges(rank, world, exchange, device)
        extras["flashinfer"] = lambda: flashinfer(rank, world, exchange, args.one_gpu)
    baseline = Baseline(lambda x: dist.all_reduce(x, group=sums))
    baseline.sum(torch.zeros(8, device=device))  # NCCL connects at its first call
    setting = start.Setting(
        gpus=tuple(f"rank{r}" for r in range(world)),
        hosts=("here",) * world,
        versions=installed(),
        islands=flat(world),
        cache=Path(folder) / "plans",
        fp8=True,
    )
    inner = communicator(args.rig, rank, world, session, exchange)
    dtype, backend = torch.bfloat16, "host" if args.rig == "host" else "native"
    captured = start.rows_up_to(args.rows)
    ours = start.planned(
        inner,
        backend,
        setting,
        device=device,
        exchange=exchange,
        baseline=baseline,
        driver=driver,
        extras=extras,
    )
    import_s = _import_flashinfer() if args.rig == "gpu" else 0.0
    dist.barrier()
    begin = time.monotonic()
    ours.prepare(args.hidden, dtype, captured)
    told: dict[str, Any] = {"seconds": time.monotonic() - begin, "import_s": import_s}
    plan = ours.plan
    assert plan is not None
    told |= {"plan": plan.digest(), "kept": any(KEPT in line for line in said.lines)}
    told["said"] = said.lines
    if first:
        again, told["chosen"] = _time_again(ours, args, device, dtype, captured, exchange, baseline)
        # What may not serve is no choice that the plan missed.
        told["off"] = [note.split(" is off: ")[0] for note in plan.notes if " is off: " in note]
        # Infinite is what a candidate cannot serve.
        told["again"] = {
            k: {n: median(t) for n, t in v.items() if max(t) < inf} for k, v in again.items()
        }
    if rank == 0:
        out.send(told)
    exchange(None)
    inner.close()
    if args.rig == "gpu":
        os._exit(0)  # ranks of one GPU cannot tear NCCL down one by one
    dist.destroy_process_group()


def _time_again(
    ours: PlannedCommunicator,
    args: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
    captured: Sequence[int],
    exchange: Any,
    baseline: Baseline,
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Times of every candidate by operation and rows, and the plan's choices."""
    plan = ours.plan
    assert plan is not None
    again: dict[str, dict[str, list[float]]] = {}
    candidates = candidates_of(ours.served, args.hidden, dtype, device, baseline)
    operated = operations(ours.served)
    for turn in range(ROUNDS):
        for c in candidates if turn % 2 == 0 else candidates[::-1]:
            for op in operated:
                for rows in captured:
                    us = _slowest(c.time, op, rows, exchange)
                    key = f"{op.value} {rows}"
                    again.setdefault(key, {}).setdefault(c.choice.name, []).append(us)
    chosen = {f"{op.value} {r}": plan.lookup(op, r).name for op in operated for r in captured}
    return again, chosen


def _slowest(timed: Callable[[Op, int], float] | None, op: Op, rows: int, exchange: Any) -> float:
    """The slowest rank's time; RuntimeError on all ranks together where it failed on any."""
    assert timed is not None
    us, error = inf, ""
    faulthandler.dump_traceback_later(STUCK_S, exit=False)
    try:
        us = timed(op, rows)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    told = exchange((us, error))
    errors = [f"rank {r}: {e}" for r, (_, e) in enumerate(told) if e]
    if errors:
        raise RuntimeError(f"{op.value}, {rows} rows: " + "; ".join(errors))
    return float(max(mine for mine, _ in told))


def _start(args: argparse.Namespace, folder: str, first: bool, deadline: float) -> dict[str, Any]:
    """Start ranks as new processes; what rank 0 tells."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=rank_main, args=(r, args, folder, theirs, first))
        for r in range(args.ranks)
    ]
    for p in ranks:
        p.start()
    answered, told = False, {}
    try:
        answered = mine.poll(max(deadline - time.monotonic(), 0))
        told = mine.recv() if answered else {}
    finally:
        for p in ranks:
            p.join(30 if answered else 0)
            p.kill()
    if not answered:
        raise SystemExit(
            f"the ranks did not answer within {args.seconds} s; their errors are above"
        )
    return told


def main() -> None:
    """Start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rig", choices=("host", "gpu"), default="host")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=600, help="bound of the whole run")
    parser.add_argument("--preload", default="", help="library the ranks load first (an NCCL)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as rig:
        if args.one_gpu:
            os.environ.update(rig.enter_context(mps()), NCCL_MULTI_RANK_GPU_ENABLE="1")
        if args.preload:  # for the ranks only, not for the MPS server
            os.environ["LD_PRELOAD"] = args.preload
        deadline = time.monotonic() + args.seconds
        first, second = (_start(args, folder, turn == 0, deadline) for turn in range(2))
    where = "one GPU" if args.one_gpu else "GPUs" if args.rig == "gpu" else "host engine, this CPU"
    table = Table(
        title=f"plan against the best candidate timed afterwards ({args.ranks} ranks, {where})"
    )
    for column in ("operation, rows", "plan's choice", "us", "best", "us", "ratio", "baseline us"):
        table.add_column(column)
    worst = 1.0
    for key, times in first["again"].items():
        name = first["chosen"][key]
        # FlashInfer must be faster than ours by its handicap to be the better choice.
        allowed = [n for n in times if not {n, n.split("/")[0]} & set(first["off"])]
        best = min(allowed, key=lambda n: times[n] * (1 + HANDICAP.get(n.split("/")[0], 0.0)))
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
    console = Console(width=140)
    console.print(table)
    for name, told in (("first", first), ("second", second)):
        source = "used the kept plan" if told["kept"] else "planned anew"
        console.print(
            f"{name} start {told['seconds']:.2f} s, {source}, plan {told['plan']} "
            f"(FlashInfer's import before it: {told['import_s']:.2f} s)"
        )
        for line in told["said"]:
            console.print(f"  {line}", markup=False, highlight=False)
    console.print(f"worst ratio {worst:.2f}")
    if args.out:
        figures = {
            "title": f"plan quality, {args.ranks} ranks, {where}",
            "worst_ratio": worst,
            "first": first,
            "second": second,
        }
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
