"""Draw one picture per schedule from the schedule data: python docs/draw_schedules.py (writes docs/img/)."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from sglang_sm120.comm.schedule import SCHEDULES, Description, describe

IMAGES = Path(__file__).parent / "img"
COLOURS = {"reduce": "#1f77b4", "cross": "#d62728", "gather": "#2ca02c"}
WHAT = {"reduce": "raw contributions", "cross": "island partials", "gather": "finished sums"}
# Rows that whole tiles divide evenly among 2, 4 and 6 ranks.
ROWS, HIDDEN = 12, 256


def place(d: Description) -> dict[int, tuple[float, float]]:
    """Ranks of an island close together, islands on a circle."""
    spots = {}
    count = len(d.islands)
    for i, island in enumerate(d.islands):
        angle = math.pi - 2 * math.pi * i / count
        for j, rank in enumerate(island):
            # Mirrored on the right, so that partners face each other.
            offset = (j - (len(island) - 1) / 2) * (-1.8 if math.cos(angle) > 0.01 else 1.8)
            x, y = 1.5 * math.cos(angle), 1.5 * math.sin(angle)
            spots[rank] = (x - 0.9 * offset * math.sin(angle), y + 0.9 * offset * math.cos(angle))
    return spots


def draw(name: str, world: int, islands: str) -> Path:
    """One panel per hop; an arrow's label is its bytes as a share of the message."""
    d = describe(name, world=world, islands=islands, rows=ROWS, hidden=HIDDEN)
    spots = place(d)
    figure, axes = plt.subplots(1, d.hops, figsize=(4.2 * d.hops, 4.2), squeeze=False)
    for hop, axis in enumerate(axes[0]):
        flows = [f for f in d.flows if f.hop == hop]
        kinds = sorted({f.region for f in flows})
        axis.set_title(f"hop {hop}: " + ", ".join(WHAT[k] for k in kinds), fontsize=10)
        for flow in flows:
            axis.annotate(
                "",
                xy=spots[flow.target],
                xytext=spots[flow.source],
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": COLOURS[flow.region],
                    "lw": 0.8 + 2 * flow.bytes / d.message_bytes,
                    "connectionstyle": "arc3,rad=0.12",
                    "shrinkA": 13,
                    "shrinkB": 13,
                },
            )
        shares = sorted({round(f.bytes / d.message_bytes, 3) for f in flows})
        axis.text(0, -2.2, "per arrow: " + ", ".join(f"{s:g} S" for s in shares), ha="center")
        for rank, (x, y) in spots.items():
            shade = plt.cm.Pastel1(d.island_of[rank])
            axis.scatter([x], [y], s=520, color=shade, edgecolors="black", zorder=3)
            axis.text(x, y, str(rank), ha="center", va="center", zorder=4)
        axis.set_xlim(-2.6, 2.6)
        axis.set_ylim(-2.4, 2.4)
        axis.set_aspect("equal")
        axis.axis("off")
    crossing = max(d.boundaries.values(), default=0) / d.message_bytes
    host = ", through host memory" if d.through_host else ""
    figure.suptitle(
        f"{name}{host}: busiest boundary {crossing:g} S, a rank sends {max(d.egress) / d.message_bytes:.3g} S"
    )
    path = IMAGES / f"schedule_{name}.png"
    figure.savefig(path, dpi=80, bbox_inches="tight")
    plt.close(figure)
    return path


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name in SCHEDULES:
        world, islands = (6, "0,1;2,3;4,5") if name == "island_ring" else (4, "0,1;2,3")
        print(draw(name, world, islands))


if __name__ == "__main__":
    main()
