"""Draw benchmark/allreduce.py's results: latency over message size, ours and the rivals, and the PCIe wire bound.

    python benchmark/plot_allreduce.py benchmark/results/2026-12-02-h200-allreduce.json out.svg

The wire bound is what the bytes alone would take between GPUs on one PCIe Gen5 x16 switch (56 GB/s and 0.7 us per
hop, better of one-shot and two-shot); on the one-GPU rig nothing crosses PCIe, so times may lie below it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import typer

HOP_US, GB_S = 0.7, 56.0


def wire_bound(world: int, nbytes: int) -> float:
    """Microseconds on the wire, without launch or arithmetic."""
    per_us = GB_S * 1e3
    one_shot = HOP_US + (world - 1) * nbytes / per_us
    two_shot = 2 * HOP_US + 2 * (world - 1) / world * nbytes / per_us
    return min(one_shot, two_shot)


def main(
    results: Annotated[Path, typer.Argument(help="JSON with a `results` list of final records.")],
    output: Annotated[Path, typer.Argument(help="Picture to write.")],
    hidden: Annotated[int, typer.Option(help="Elements per row.")] = 7168,
) -> None:
    document = json.loads(results.read_text())
    records = [r for r in document["results"] if r["hidden"] == hidden]
    worlds = sorted({r["world"] for r in records})
    figure, axes = plt.subplots(2, len(worlds), figsize=(4.2 * len(worlds), 7), squeeze=False)
    for row, op in enumerate(("plain", "fused")):
        for column, world in enumerate(worlds):
            axis = axes[row][column]
            mine = [r for r in records if r["world"] == world and r["op"] == op]
            for name in dict.fromkeys(r["contender"] for r in mine):
                points = sorted(
                    (r["rows"] * hidden * 2 / 1024, r["us"]) for r in mine if r["contender"] == name
                )
                axis.plot(*zip(*points), marker="o", markersize=3, label=name)
            sizes = sorted({r["rows"] * hidden * 2 for r in mine})
            axis.plot(
                [s / 1024 for s in sizes],
                [wire_bound(world, s) for s in sizes],
                "k--",
                label="PCIe wire bound",
            )
            axis.set(
                xscale="log",
                yscale="log",
                title=f"{op}, world {world}",
                xlabel="KiB",
                ylabel="us per call",
            )
            axis.grid(True, which="both", alpha=0.3)
            axis.legend(fontsize=7)
    figure.suptitle(
        "All-reduce (+ residual + RMSNorm), one H200, processes under MPS, CUDA graphs", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(output)


if __name__ == "__main__":
    typer.run(main)
