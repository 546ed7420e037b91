"""What does weight prefetch under the fused all-reduce bring, and by whom should it be done?

    python benchmark/prefetch.py --json benchmark/results/prefetch.json

A chain of [fused sum, attention's projections, fused sum, router and shared expert] with Kimi-K2.5's TP 8 shapes runs
as a CUDA graph over so many layers that no weight stays in L2. The peer's part of each sum arrives a given time late.
Every graph runs without and with prefetch, in A-B-B-A order, and must leave the same bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from prefetch_rig import Chain, Pair, Timer, make_steps, memory_bandwidth, pair, rig_name
from rich.console import Console
from rich.table import Table
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.native import How
from sglang_sm120.verify.prefetch import Limits, PrefetchPlan

# Who asks for the memory: thread blocks beside the sum's own, 0 the sum's own warps; or a side stream's kernel.
WAYS: dict[str, int | None] = {"own warps": 0, "16 CTAs": 16, "64 CTAs": 64, "side stream": None}
SIDE_CTAS = 32


class Ahead:
    """Prefetch for a chain: what to ask for before each sum."""

    def __init__(self, chain: Chain, plan: PrefetchPlan, wait_us: float) -> None:
        self.chain = chain
        self.chunks = plan.array().cuda()
        self.windows = [plan.window(b, wait_us) for b in range(len(plan.boundaries))]
        self.bytes = [plan.bytes_at(b, wait_us) for b in range(len(plan.boundaries))]
        self.side = torch.cuda.Stream()

    def capture(self, ctas: int | None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The chain with prefetch by one of `WAYS`."""
        communicator = self.chain.pair.ranks[0]
        if ctas is not None:
            many = ctas
            return self.chain.capture(
                lambda i: communicator.prefetch_in_next(self.chunks, *self.windows[i], many)
            )

        def fork(i: int) -> None:
            self.side.wait_stream(torch.cuda.current_stream())
            first, count = self.windows[i]
            self.chain.pair.lib.cuda_prefetch(
                self.chunks, first, count, SIDE_CTAS, self.side.cuda_stream
            )

        return self.chain.capture(fork, lambda: torch.cuda.current_stream().wait_stream(self.side))


def per_sum(us: float, chain: Chain) -> float:
    return us / len(chain.steps)


def prefetch_case(
    both: Pair, chain: Chain, alone: Chain, wait_us: float, bandwidth: float
) -> dict[str, Any]:
    """One wait: microseconds per sum without and with prefetch."""
    timer = Timer(both)
    peer = both.answer(chain.rows, wait_us, len(chain.steps))
    sums, _ = alone.capture()
    bare = per_sum(timer.compare([sums], peer)[0], chain)
    gpu: Any = torch.cuda.get_device_properties(0)
    plan = PrefetchPlan(chain.boundaries(), Limits(gpu.L2_cache_size, bandwidth))
    # A sum's own time without anything else is what the plan of a server knows.
    ahead = Ahead(chain, plan, bare)
    graphs = {"off": chain.capture()} | {way: ahead.capture(n) for way, n in WAYS.items()}
    times = timer.compare([graph for graph, _ in graphs.values()], peer)
    plain = graphs["off"][1]
    return {
        "rows": chain.rows,
        "wire_us": wait_us,
        "sum_us": bare,
        "prefetched_kib": [b // 1024 for b in ahead.bytes[:2]],
        "us": {way: per_sum(t, chain) for way, t in zip(graphs, times, strict=True)},
        "same_bits": {way: torch.equal(plain, out) for way, (_, out) in graphs.items()},
    }


def early_case(both: Pair, how: str, rows: int, wait_us: float, layers: int) -> dict[str, Any]:
    """Programmatic launch of our kernel behind its predecessor: on and off."""
    chain = Chain(both, rows, make_steps(layers, rows, how))
    timer = Timer(both)
    peer = both.answer(rows, wait_us, len(chain.steps))
    graphs = []
    for early in (False, True):
        both.ranks[0].pin(Op.ALL_REDUCE_RMSNORM, rows, How("one_shot", early_launch=early))
        graphs.append(chain.capture()[0])
    both.ranks[0].pin(Op.ALL_REDUCE_RMSNORM, rows, None)
    off, on = (per_sum(t, chain) for t in timer.compare(graphs, peer))
    return {"gemv": how, "rows": rows, "wire_us": wait_us, "off_us": off, "on_us": on}


def prefetch_table(results: list[dict[str, Any]], rig: str) -> Table:
    table = Table(
        title=f"Prefetch under the fused sum, 2 virtual ranks on one GPU ({rig}), emulated wire, us per sum and GEMVs"
    )
    for column in ("weights", "rows", "wire us", "sum alone", "MiB", "off", *WAYS):
        table.add_column(column, justify="right")
    for r in results:
        off = r["us"]["off"]
        ratios = [f"{r['us'][way] / off:.3f}" for way in WAYS]
        mib = "/".join(f"{k / 1024:.1f}" for k in r["prefetched_kib"])
        table.add_row(
            r["weights"], str(r["rows"]), f"{r['wire_us']:g}", f"{r['sum_us']:.1f}", mib, f"{off:.2f}", *ratios
        )  # fmt: skip
    return table


def early_table(results: list[dict[str, Any]], rig: str) -> Table:
    table = Table(title=f"Early launch (PDL) of the fused sum, 2 virtual ranks on one GPU ({rig})")
    for column in ("GEMV", "rows", "wire us", "off us", "on us", "on / off"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            r["gemv"], str(r["rows"]), f"{r['wire_us']:g}", f"{r['off_us']:.2f}", f"{r['on_us']:.2f}",
            f"{r['on_us'] / r['off_us']:.3f}",
        )  # fmt: skip
    return table


def verdict(results: list[dict[str, Any]], say: Callable[[str], None]) -> str:
    """The best way over all cases, and whether it is within the bounds."""

    def mean(way: str) -> float:
        return math.exp(
            sum(math.log(r["us"][way] / r["us"]["off"]) for r in results) / len(results)
        )

    best = min(WAYS, key=mean)
    for way in WAYS:
        ratios = [r["us"][way] / r["us"]["off"] for r in results]
        at_10 = [r["us"][way] / r["us"]["off"] for r in results if r["wire_us"] == 10]
        tail = f"; at 10 us of wire {min(at_10):.3f} to {max(at_10):.3f}" if at_10 else ""
        say(f"{way}: geometric mean {mean(way):.3f}, worst {max(ratios):.3f}{tail}")
    wrong = [r for r in results if not all(r["same_bits"].values())]
    say(f"best: {best}; results with other bits than without prefetch: {len(wrong)}")
    return best


def main(
    rows: Annotated[str, typer.Option(help="Row counts.")] = "1,4,16",
    waits: Annotated[str, typer.Option(help="Emulated wire, microseconds.")] = "0,5,10,20",
    weights: Annotated[str, typer.Option(help="bf16, int4.")] = "bf16,int4",
    layers: Annotated[int, typer.Option(help="Layers with own weights.")] = 12,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure prefetch and early launch; exit code 1 when a result has other bits with prefetch."""
    console = Console(width=150)
    rig, bandwidth = rig_name(), memory_bandwidth()
    console.print(f"{rig}: memory reads at {bandwidth / 1000:.0f} GB/s")
    results, early = [], []
    with pair() as both, torch.no_grad():
        for how in weights.split(","):
            for n in map(int, rows.split(",")):
                chain, alone = (Chain(both, n, make_steps(layers, n, h)) for h in (how, "none"))
                for wait in map(float, waits.split(",")):
                    case = prefetch_case(both, chain, alone, wait, bandwidth)
                    results.append({"weights": how, **case})
                del chain
        console.print(prefetch_table(results, rig))
        best = verdict(results, console.print)
        # Three of the GEMV's grids fit beside the peer's kernel only up to 4 rows: see the rig.
        for how in ("none", "bf16", "triton", "triton early"):
            for n in (1, 4):
                early.append(early_case(both, how, n, 5.0, layers))
        console.print(early_table(early, rig))
    if out:
        found = {"rig": rig, "bandwidth_gb_s": bandwidth / 1000, "best": best, "prefetch": results, "early": early}  # fmt: skip
        out.write_text(json.dumps(found, indent=1) + "\n")
    if not all(all(r["same_bits"].values()) for r in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
