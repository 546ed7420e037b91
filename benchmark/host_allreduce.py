"""Host engine against gloo: all-reduce, and all-reduce + residual + RMSNorm, in one run on the CPU.

Each timing is the median over rounds of the slowest rank; the two rivals alternate within a round, so that both
see the same machine. Bits are compared before anything is timed.

    python benchmark/host_allreduce.py [--world 2] [--rows 1,4,16] [--hidden 7168] [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from sglang_sm120.comm.host import HostCommunicator

RESULTS = Path(__file__).parent / "results" / "host_allreduce.json"
TARGET = {"all_reduce": 0.3, "all_reduce_rmsnorm": 0.4}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EPS = 1e-6


def processor() -> str:
    """Model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def unfused_norm(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's RMSNorm.forward_native with a residual, in torch."""
    x = total.float() + residual.float()
    residual_out = x.to(total.dtype)
    x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS)
    return (x * weight).to(total.dtype), residual_out


def timed(call: Callable[[], object], calls: int) -> float:
    """Microseconds per call of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    spent = torch.tensor([(time.perf_counter() - begin) / calls * 1e6], dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def worker(rank: int, args: argparse.Namespace, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.world)
    ours = HostCommunicator("bench", rank, args.world, session=f"bench-{Path(store).name}")
    results = []
    for dtype_name, dtype in DTYPES.items():
        for rows in args.rows:
            generator = torch.Generator().manual_seed(rank)
            x = torch.randn(rows, args.hidden, generator=generator).to(dtype)
            generator.manual_seed(99)
            residual = torch.randn(rows, args.hidden, generator=generator).to(dtype)
            weight = torch.randn(args.hidden, generator=generator).to(dtype)

            def gloo_sum(x: torch.Tensor = x) -> torch.Tensor:
                total = x.clone()
                dist.all_reduce(total)
                return total

            def gloo_fused(
                x: torch.Tensor = x,
                residual: torch.Tensor = residual,
                weight: torch.Tensor = weight,
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return unfused_norm(gloo_sum(x), residual, weight)

            def our_sum(x: torch.Tensor = x) -> torch.Tensor:
                return ours.all_reduce(x)

            def our_fused(
                x: torch.Tensor = x,
                residual: torch.Tensor = residual,
                weight: torch.Tensor = weight,
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return ours.all_reduce_rmsnorm(x, residual, weight, EPS)

            if args.world == 2:  # two addends have one order, so even gloo's bits must be ours
                assert torch.equal(our_sum(), gloo_sum())
                assert torch.equal(our_fused()[1], gloo_fused()[1])
            torch.testing.assert_close(our_fused()[0], gloo_fused()[0], rtol=2**-7, atol=1e-2)
            for op, rival, mine in (
                ("all_reduce", gloo_sum, our_sum),
                ("all_reduce_rmsnorm", gloo_fused, our_fused),
            ):
                for call in (rival, mine):
                    timed(call, args.calls)
                times: dict[str, list[float]] = {"gloo": [], "ours": []}
                for index in range(args.rounds):
                    order = [("gloo", rival), ("ours", mine)]
                    for label, call in order if index % 2 else reversed(order):
                        times[label].append(timed(call, args.calls))
                gloo_us = statistics.median(times["gloo"])
                our_us = statistics.median(times["ours"])
                results.append(
                    {
                        "op": op,
                        "dtype": dtype_name,
                        "rows": rows,
                        "hidden": args.hidden,
                        "gloo_us": round(gloo_us, 2),
                        "ours_us": round(our_us, 2),
                        "ratio": round(our_us / gloo_us, 3),
                        "target": TARGET[op],
                    }
                )
    ours.close()
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument(
        "--rows", type=lambda text: [int(r) for r in text.split(",")], default=[1, 4, 16]
    )
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    rig = f"CPU, {args.world} processes, {os.cpu_count()} cores of {processor()}"
    with tempfile.TemporaryDirectory() as folder:
        store = tempfile.mktemp(dir=folder, prefix=f"{os.getpid()}-")
        out = f"{folder}/results.json"
        mp.spawn(worker, (args, store, out), nprocs=args.world)
        results = json.loads(Path(out).read_text())
    table = Table(
        title=f"Host engine against gloo ({rig}); us per call, median of {args.rounds} rounds"
    )
    for column in ("operation", "dtype", "rows x hidden", "gloo", "ours", "ratio", "target"):
        table.add_column(column, justify="left" if column in ("operation", "dtype") else "right")
    missed = 0
    for r in results:
        missed += r["ratio"] > r["target"]
        colour = "red" if r["ratio"] > r["target"] else "green"
        rival = r["op"].replace("all_reduce_rmsnorm", "all_reduce + add + RMSNorm")
        table.add_row(
            rival,
            r["dtype"],
            f"{r['rows']} x {r['hidden']}",
            f"{r['gloo_us']:.1f}",
            f"{r['ours_us']:.1f}",
            f"[{colour}]{r['ratio']:.2f}[/]",
            f"<= {r['target']}",
        )
    Console(width=110).print(table)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(
        json.dumps({"rig": rig, "world": args.world, "results": results}, indent=1) + "\n"
    )
    print(f"wrote {args.json}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
