"""Would a verify batch in two halves pay, each half's sums under the other half's compute?

    python benchmark/split_verify.py --json benchmark/results/split_verify.json

Measures the whole pass both ways on one GPU: real matrix products, our fused sums, and a peer whose part arrives
after the time that the message takes on an emulated wire. The halves' messages take turns on that wire, and each half
has a channel and a stream of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from prefetch_rig import (
    AFTER_ATTENTION,
    AFTER_FFN,
    HIDDEN,
    Chain,
    Gemm,
    Pair,
    Timer,
    answers,
    make_gemm,
    pair,
    rig_name,
)
from rich.console import Console
from rich.table import Table
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.native_how import How

WORLD = 8  # whose message sizes and shapes are emulated
LATENCY_US = 5.0  # two hops
CTAS = 8  # of a sum; those of the peer take SMs that another device's would not
LINKS_GB_S = (50.0, 25.0)  # one switch, and a fabric whose links are shared
# The FFN of Kimi-K2.5's dense layer under TP 8, and its routed experts: 384 of width 2048, eight per token.
DENSE = (("gate_up", 4608, HIDDEN), ("down", HIDDEN, 2304))
EXPERTS, PER_TOKEN, WIDTH = 384, 8, 256
INT4_SHARE = 4  # INT4 experts are stood for by a quarter as many bf16 ones: as many bytes


def wire_us(rows: int, gb_s: float) -> float:
    """Two-shot sum of [rows, 7168] bf16 over 8 ranks: two hops, and 2 x 7/8 of the message through each link."""
    return LATENCY_US + 2 * (WORLD - 1) / WORLD * rows * HIDDEN * 2 / (gb_s * 1000)


def active_experts(rows: int) -> float:
    """Experts that `rows` tokens use, if each picks its eight evenly."""
    return EXPERTS * (1 - (1 - PER_TOKEN / EXPERTS) ** rows)


def routed(rows_max: int) -> Gemm:
    """The routed experts of one layer: those that so many rows use, with the rows that fall to each."""
    count = EXPERTS // INT4_SHARE
    up = torch.randn(count, HIDDEN, 2 * WIDTH, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    down = torch.randn(count, WIDTH, HIDDEN, device="cuda", dtype=torch.bfloat16).mul_(0.02)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        used = max(1, round(active_experts(rows) / INT4_SHARE))
        each = max(1, round(rows * PER_TOKEN / active_experts(rows)))
        spread = x[:each].expand(used, each, HIDDEN)
        inner = torch.bmm(spread, up[:used])
        torch.bmm(inner[..., :WIDTH], down[:used])
        return x

    static = torch.randn(rows_max, HIDDEN, device="cuda").mul(0.1).bfloat16()
    return Gemm("experts", multiply, (up, down), static)


def make(model: str, layers: int, rows: int) -> list[list[Gemm]]:
    """Projections of each step: "dense" (attention, dense FFN) or "mixture" (attention, shared and routed experts)."""
    steps = []
    for _ in range(layers):
        steps.append([make_gemm(*g, rows, "bf16") for g in AFTER_FFN])
        if model == "dense":
            steps.append([make_gemm(*g, rows, "bf16") for g in DENSE])
        else:
            steps.append([*(make_gemm(*g, rows, "bf16") for g in AFTER_ATTENTION), routed(rows)])
    return steps


def compute_us(chain: Chain) -> float:
    """Microseconds of the products alone, per step."""
    chain.warm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in chain.steps:
            for gemm in step:
                gemm.run(None, chain.rows)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 100 / len(chain.steps)


def capture_split(halves: list[Chain]) -> torch.cuda.CUDAGraph:
    """Both halves in one graph, each on its own stream."""
    for half in halves:
        half.warm()
    streams = [torch.cuda.Stream() for _ in halves]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(main)
        state = [(half.x, half.residual) for half in halves]
        for i in range(len(halves[0].steps)):
            for n, half in enumerate(halves):
                with torch.cuda.stream(streams[n]):
                    state[n] = half.step(i, *state[n])
        for stream in streams:
            main.wait_stream(stream)
    return graph


def case(pairs: list[Pair], model: str, rows: int, layers: int) -> list[dict[str, Any]]:
    """One batch, over all links."""
    steps = make(model, layers, rows)
    whole = Chain(pairs[0], rows, steps)
    halves = [Chain(p, rows // 2, steps) for p in pairs]
    for p in pairs:
        for communicator in p.ranks:
            for n in (rows, rows // 2):
                communicator.pin(Op.ALL_REDUCE_RMSNORM, n, How("one_shot", 1, 28, 1, CTAS))
    products = [compute_us(whole), compute_us(halves[0])]
    timer = Timer(pairs[0])
    bare = Chain(pairs[0], rows, [[] for _ in steps]).capture()[0]
    one, two = whole.capture()[0], capture_split(halves)
    found = []
    for link in LINKS_GB_S:
        late = wire_us(rows, link)
        us = [
            timer.compare([bare], answers(pairs[:1], rows, late, len(steps)))[0],
            timer.compare([one], answers(pairs[:1], rows, late, len(steps)))[0],
            timer.compare([two], answers(pairs, rows // 2, wire_us(rows // 2, link), len(steps)))[0],
            timer.compare([one], answers(pairs[:1], rows, late, len(steps)))[0],
        ]  # fmt: skip
        pairs[1].ranks[0].check()
        found.append(
            {
                "model": model, "rows": rows, "link_gb_s": link, "wire_us": late,
                "products_us": products[0], "half_products_us": products[1],
                "sum_us": us[0] / len(steps), "whole_us": (us[1] + us[3]) / 2 / len(steps),
                "split_us": us[2] / len(steps),
            }
        )  # fmt: skip
    return found


def table_of(results: list[dict[str, Any]], rig: str) -> Table:
    table = Table(
        title=f"Split verify, 2 virtual ranks on one GPU ({rig}), wire of 8 ranks emulated, us per sum and products"
    )
    for column in ("layer", "rows", "link GB/s", "wire us", "sum alone", "products", "of a half", "whole", "split", "split / whole"):  # fmt: skip
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            r["model"], str(r["rows"]), f"{r['link_gb_s']:g}", f"{r['wire_us']:.0f}", f"{r['sum_us']:.1f}",
            f"{r['products_us']:.1f}",
            f"{r['half_products_us']:.1f}", f"{r['whole_us']:.1f}", f"{r['split_us']:.1f}",
            f"{r['split_us'] / r['whole_us']:.3f}",
        )  # fmt: skip
    return table


def main(
    rows: Annotated[str, typer.Option(help="Rows of the whole batch.")] = "64,128,256",
    models: Annotated[str, typer.Option(help="dense, mixture.")] = "dense,mixture",
    layers: Annotated[int, typer.Option(help="Layers with own weights.")] = 4,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure whole and split batches and print the ratio."""
    console, rig = Console(width=150), rig_name()
    results: list[dict[str, Any]] = []
    with pair("whole") as first, pair("half") as second, torch.no_grad():
        for model in models.split(","):
            for n in map(int, rows.split(",")):
                results += case([first, second], model, n, layers)
    console.print(table_of(results, rig))
    if out:
        out.write_text(json.dumps({"rig": rig, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
