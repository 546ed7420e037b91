"""What does weight prefetch under the fused all-reduce bring, and by whom should it be done?

    python benchmark/prefetch.py --json benchmark/results/prefetch.json

A chain of [fused sum, attention's projections, fused sum, router and shared expert] with Kimi-K2.5's TP 8 shapes runs
as a CUDA graph over so many layers that no weight stays in L2. The peer's part of each sum arrives a given time late.
Every graph runs without and with prefetch, in A-B-B-A order, and must leave the same bits. `--leave-gb-s 0,1600`
adds a table with a reader beside the chain that takes memory bandwidth away, to come near another card.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from prefetch_rig import Chain, Pair, Reader, Timer, make_steps, memory_bandwidth, pair, rig_name
from rich.console import Console
from rich.table import Table
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.native_how import How
from sglang_sm120.verify.prefetch import Limits, PrefetchPlan

# Who asks for the memory: so many thread blocks beside the sum's own, or a kernel of so many on a side stream.
WAYS: dict[str, tuple[str, int]] = {
    "4 CTAs": ("inside", 4),
    "8 CTAs": ("inside", 8),
    "16 CTAs": ("inside", 16),
    "32 CTAs": ("inside", 32),
    "side, 8": ("side", 8),
    "side, 32": ("side", 32),
}


class Ahead:
    """Prefetch for a chain: what to ask for before each sum."""

    def __init__(self, chain: Chain, plan: PrefetchPlan, wait_us: float) -> None:
        self.chain = chain
        self.chunks = plan.array().cuda()
        self.windows = [plan.window(b, wait_us) for b in range(len(plan.boundaries))]
        self.bytes = [plan.bytes_at(b, wait_us) for b in range(len(plan.boundaries))]
        self.side = chain.pair.side

    def capture(self, way: tuple[str, int]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The chain with prefetch by one of `WAYS`."""
        where, ctas = way
        communicator = self.chain.pair.ranks[0]
        if where == "inside":
            return self.chain.capture(
                lambda i: communicator.prefetch_in_next(self.chunks, *self.windows[i], ctas)
            )

        def fork(i: int) -> None:
            self.side.wait_stream(torch.cuda.current_stream())
            self.chain.pair.lib.cuda_prefetch(
                self.chunks, *self.windows[i], ctas, self.side.cuda_stream
            )

        return self.chain.capture(fork, lambda: torch.cuda.current_stream().wait_stream(self.side))


def per_sum(us: float, chain: Chain) -> float:
    return us / len(chain.steps)


def prefetch_case(
    both: Pair, chain: Chain, alone: Chain, wait_us: float, bandwidth: float, reader: Reader | None
) -> dict[str, Any]:
    """One wait: microseconds per sum without and with prefetch."""
    timer = Timer(both, reader)
    peer = both.answer(chain.rows, wait_us, len(chain.steps))
    sums, _ = alone.capture()
    bare = per_sum(timer.compare([sums], peer)[0], chain)
    gpu: Any = torch.cuda.get_device_properties(0)
    plan = PrefetchPlan(chain.boundaries(), Limits(gpu.L2_cache_size, bandwidth))
    # A sum's own time without anything else is what the plan of a server knows.
    ahead = Ahead(chain, plan, bare)
    graphs = {"off": chain.capture()} | {way: ahead.capture(how) for way, how in WAYS.items()}
    times = timer.compare([graph for graph, _ in graphs.values()], peer)
    plain = graphs["off"][1]
    return {
        "memory_gb_s": round(bandwidth / 1000),
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
        title=f"Prefetch under the fused sum, 2 virtual ranks on one GPU ({rig}; emulated wire; memory reads "
        f"{results[0]['memory_gb_s']} GB/s), us per sum and GEMVs"
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


def verdict(results: list[dict[str, Any]], say: Callable[[str], None]) -> None:
    """Say which way is best over all cases, and the worst case of each."""

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


def main(
    rows: Annotated[str, typer.Option(help="Row counts.")] = "1,4,16",
    waits: Annotated[str, typer.Option(help="Emulated wire, microseconds.")] = "0,5,10,20",
    weights: Annotated[str, typer.Option(help="bf16, int4.")] = "bf16,int4",
    layers: Annotated[int, typer.Option(help="Layers with own weights.")] = 12,
    leave_gb_s: Annotated[
        str,
        typer.Option(
            help="Measure beside a reader that leaves about so much memory bandwidth, each a table, 0 for no reader: "
            "1600 comes near a card with GDDR7 at 1792 GB/s."
        ),
    ] = "0",
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure prefetch and early launch; exit code 1 when a result has other bits with prefetch."""
    console = Console(width=150)
    rig, bandwidth = rig_name(), memory_bandwidth()
    console.print(f"{rig}: memory reads at {bandwidth / 1000:.0f} GB/s")
    results: list[dict[str, Any]] = []
    early: list[dict[str, Any]] = []

    def save() -> None:
        if out:
            data = {"rig": rig, "prefetch": results, "early": early}
            out.write_text(json.dumps(data, indent=1) + "\n")

    with pair() as both, torch.no_grad():
        for leave in map(float, leave_gb_s.split(",")):
            reader = Reader(leave * 1000) if leave else None
            left = reader.left if reader else bandwidth
            if reader:
                console.print(f"{reader.ctas} CTAs read beside it and leave {left / 1000:.0f} GB/s")
            found = []
            for how in weights.split(","):
                for n in map(int, rows.split(",")):
                    chain, alone = (Chain(both, n, make_steps(layers, n, h)) for h in (how, "none"))
                    for wait in map(float, waits.split(",")):
                        case = prefetch_case(both, chain, alone, wait, left, reader)
                        found.append({"weights": how, **case})
                    del chain
            console.print(prefetch_table(found, rig))
            verdict(found, console.print)
            results += found
            save()  # what the next table cannot take away
        # A GEMV that waits on its SMs leaves room for the peer's kernel up to 4 rows.
        for how in ("none", "bf16", "triton", "triton early"):
            for n in (1, 4):
                early.append(early_case(both, how, n, 5.0, layers))
        console.print(early_table(early, rig))
    save()
    if not all(all(r["same_bits"].values()) for r in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
