"""What a matrix-vector product, bound by memory bandwidth, loses while our fused all-reduce runs beside it.

    python benchmark/gemv_beside.py --json benchmark/results/gemv-beside.json

Two virtual ranks in one process: both ranks' kernels run on this GPU, so it carries twice the thread blocks that a GPU
of a real machine would. The sums are replayed without a pause for as long as the products run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
from rig import VirtualGroup, inputs

HIDDEN = 7168
OUTPUTS = 65536  # 940 MB of bf16 weights: far more than any L2
CALLS = 50  # sums per graph
PRODUCTS = 20


def product_us(x: torch.Tensor, weight: torch.Tensor, stream: torch.cuda.Stream) -> list[float]:
    """Microseconds of each of `PRODUCTS` products, [1, hidden] x [hidden, outputs]."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(PRODUCTS + 1)]
    with torch.cuda.stream(stream):
        for mark in marks[:-1]:
            mark.record()
            torch.mv(weight, x)
        marks[-1].record()
    stream.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in zip(marks, marks[1:])]


def main(
    rows: Annotated[str, typer.Option(help="Rows of the sums.")] = "1,4,16,64",
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the results go.")] = None,
) -> None:
    """Time the products alone and beside the sums, in A-B-B-A order."""
    gpu = torch.cuda.get_device_name()
    weight = torch.randn(OUTPUTS, HIDDEN, device="cuda").bfloat16()
    x = torch.randn(HIDDEN, device="cuda").bfloat16()
    beside = torch.cuda.Stream()
    product_us(x, weight, beside)
    found = []
    with VirtualGroup(2) as group:
        for count in map(int, rows.split(",")):
            parts, residual, norm = inputs(2, count, HIDDEN)
            graphs = []
            for rank, communicator in enumerate(group.ranks):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=group.streams[rank]):
                    for _ in range(CALLS):
                        communicator.all_reduce_rmsnorm(parts[rank], residual, norm, 1e-6)
                graphs.append(graph)

            def sums(replays: int, graphs: list[torch.cuda.CUDAGraph] = graphs) -> None:
                for _ in range(replays):
                    for rank, graph in enumerate(graphs):
                        with torch.cuda.stream(group.streams[rank]):
                            graph.replay()

            sums(1)
            torch.cuda.synchronize()
            began = time.perf_counter()
            sums(4)
            torch.cuda.synchronize()
            sum_us = (time.perf_counter() - began) * 1e6 / (4 * CALLS)
            alone = product_us(x, weight, beside)
            # Enough sums to outlast the products.
            replays = int(2 * sum(alone) / (sum_us * CALLS)) + 2
            with_sums = []
            for _ in range(2):
                sums(replays)
                with_sums += product_us(x, weight, beside)
                torch.cuda.synchronize()
            alone += product_us(x, weight, beside)
            a, b = statistics.median(alone), statistics.median(with_sums)
            found.append({"rows": count, "sum_us": sum_us, "alone_us": a, "beside_us": b, "loss": 1 - a / b})  # fmt: skip
    size = OUTPUTS * HIDDEN * 2
    out = Table(
        title=f"GEMV beside the fused all-reduce, 2 virtual ranks (32 CTAs in all) on one {gpu}"
    )
    for title in ("rows of the sum", "sum us", "GEMV alone us", "GB/s", "beside us", "GB/s", "bandwidth lost"):  # fmt: skip
        out.add_column(title, justify="right")
    for r in found:
        out.add_row(
            str(r["rows"]), f"{r['sum_us']:.1f}", f"{r['alone_us']:.1f}", f"{size / r['alone_us'] / 1e3:.0f}",
            f"{r['beside_us']:.1f}", f"{size / r['beside_us'] / 1e3:.0f}", f"{r['loss']:.1%}",
        )  # fmt: skip
    Console(width=120).print(out)
    if json_path is not None:
        json_path.write_text(json.dumps({"rig": f"2 virtual ranks on one {gpu}", "results": found}, indent=1))  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
