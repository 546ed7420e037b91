"""How far is the fabric simulator from published all-reduce latencies?

Prints every published row beside the simulated figure, writes JSON (--json FILE) and the picture of
docs/simulator.md (--plot FILE). `--fit` searches the constants again on the fitting half and prints what it found;
it never looks at the checked half. Everything here is simulated: no GPU takes part.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from sglang_sm120.fabric import simulate_published as published
from sglang_sm120.fabric.rivals import CONSTANTS, Constants

# NCCL's source gives the two base latencies, so the search leaves them alone.
FREE = (
    "ll_hop_us",
    "ll_gbps",
    "simple_hop_us",
    "simple_gbps",
    "push_base_us",
    "barrier_us",
    "pull_base_us",
    "phase_us",
    "norm_us",
)


# Which constants a method depends on, so that the search simulates only what a change can move.
DEPENDS = {
    "nccl": (
        "ll_base_us",
        "ll_hop_us",
        "ll_gbps",
        "simple_base_us",
        "simple_hop_us",
        "simple_gbps",
    ),
    "nccl-simple": ("simple_base_us", "simple_hop_us", "simple_gbps"),
    "one-shot-push": ("push_base_us",),
    "one-shot-push-barrier": ("push_base_us", "barrier_us"),
    "one-shot-pull": ("pull_base_us", "barrier_us"),
    "one-shot-pull-fused": ("pull_base_us", "barrier_us", "norm_us"),
    "staged-push": ("push_base_us", "phase_us"),
    "island-pull": ("pull_base_us", "barrier_us", "phase_us"),
    "leader-pull": ("pull_base_us", "barrier_us", "phase_us"),
}


def table(rows: list[published.Row]) -> Table:
    """All rows, checked ones marked."""
    out = Table(title="Simulated against published all-reduce latency (us)")
    for column in ("series", "method", "KiB", "published", "simulated", "error", "half"):
        out.add_column(column, justify="left" if column in ("series", "method") else "right")
    for r in rows:
        colour = "red" if abs(r.error) > 0.5 else "green" if abs(r.error) <= 0.25 else "yellow"
        out.add_row(
            r.series.id,
            r.series.method,
            f"{r.nbytes / 1024:g}",
            f"{r.published_us:.1f}",
            f"{r.simulated_us:.1f}",
            f"[{colour}]{r.error:+.0%}[/]",
            "set" if r.fitted else "checked",
        )
    return out


def by_machine(rows: list[published.Row]) -> Table:
    """Median error of the checked half per machine."""
    groups: dict[str, list[published.Row]] = defaultdict(list)
    for r in rows:
        if not r.fitted:
            groups[r.series.machine].append(r)
    out = Table(title="Checked half: median absolute error by machine")
    for column in ("machine", "rows", "median", "worst"):
        out.add_column(column, justify="left" if column == "machine" else "right")
    for name, members in sorted(groups.items()):
        worst = max(members, key=lambda r: abs(r.error))
        out.add_row(
            name,
            str(len(members)),
            f"{published.median_error(members):.0%}",
            f"{worst.error:+.0%}",
        )
    return out


def search(start: Constants) -> Constants:
    """Coordinate descent on the mean absolute log error of the fitting half."""
    known: dict[tuple[object, ...], float] = {}

    def curve_loss(one: published.Series, constants: Constants) -> float:
        key = (one.id, *(getattr(constants, name) for name in DEPENDS[one.method]))
        if key not in known:
            known[key] = sum(
                abs(math.log(published.predict(one, nbytes, constants) / us))
                for nbytes, us in one.rows[::2]
            )
        return known[key]

    rows = sum(len(one.rows[::2]) for one in published.series())

    def loss(constants: Constants) -> float:
        return sum(curve_loss(one, constants) for one in published.series()) / rows

    best, best_loss = start, loss(start)
    for factor in (1.3, 1.1, 1.03):
        moved = True
        while moved:
            moved = False
            for name in FREE:
                for by in (factor, 1 / factor):
                    tried = msgspec.structs.replace(best, **{name: getattr(best, name) * by})
                    got = loss(tried)
                    if got < best_loss - 1e-4:
                        best, best_loss, moved = tried, got, True
    print(f"mean absolute log error of the fitting half: {best_loss:.4f}")
    return best


def plot(rows: list[published.Row], path: Path) -> None:
    """Published on one axis, simulated on the other, one marker per machine."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 6.4))
    names = sorted({r.series.machine for r in rows})
    colours = plt.get_cmap("tab20")
    low, high = 3.0, 1000.0
    for i, name in enumerate(names):
        for fitted, face in ((True, "none"), (False, colours(i))):
            some = [r for r in rows if r.series.machine == name and r.fitted == fitted]
            axes.scatter(
                [r.published_us for r in some],
                [r.simulated_us for r in some],
                s=26,
                facecolors=face,
                edgecolors=[colours(i)],
                label=None if fitted else name,
            )
    line = [low, high]
    axes.plot(line, line, color="black", linewidth=0.8)
    axes.fill_between(line, [v * 0.75 for v in line], [v * 1.25 for v in line], alpha=0.12)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=line,
        ylim=line,
        xlabel="published (us)",
        ylabel="simulated (us)",
        title="All-reduce latency: filled = only checked, hollow = set constants, band = 25%",
    )
    axes.title.set_fontsize(9)
    axes.legend(fontsize=6.5, loc="upper left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="search the constants again")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--plot", type=Path, help="write the picture here")
    args = parser.parse_args()
    console = Console(width=140)
    if args.fit:
        found = search(CONSTANTS)
        for name in FREE:
            console.print(
                f"{name} = {getattr(found, name):.3g}   (now {getattr(CONSTANTS, name):g})"
            )
        return
    rows = published.compare()
    console.print(table(rows))
    console.print(by_machine(rows))
    for half, fitted in (("fitting", True), ("checked", False)):
        some = [r for r in rows if r.fitted == fitted]
        machines = len({r.series.machine for r in some})
        console.print(
            f"{half} half: {len(some)} rows, {machines} machines, "
            f"median absolute error {published.median_error(some):.1%}"
        )
    for r in rows:
        if not r.fitted and abs(r.error) > 0.5:
            console.print(f"outlier {r.series.id} {r.nbytes} B: {r.error:+.0%}: {r.series.reason}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(
            json.dumps(
                [
                    {
                        "series": r.series.id,
                        "machine": r.series.machine,
                        "method": r.series.method,
                        "source": r.series.source,
                        "bytes": r.nbytes,
                        "published_us": r.published_us,
                        "simulated_us": round(r.simulated_us, 2),
                        "half": "set" if r.fitted else "checked",
                    }
                    for r in rows
                ],
                indent=1,
            ).encode()
        )
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
