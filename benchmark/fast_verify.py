"""What does each step of docs/fast-verify.md give on each class of machine? Simulated; no GPU takes part.

Prints the tables, writes them between the markers of the page (--write docs/fast-verify.md), or says whether the
page is up to date (--check docs/fast-verify.md, exit code 1 when it is not).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_sm120.fabric import simulate_machine
from sglang_sm120.foresight import compute, shapes
from sglang_sm120.foresight.deployment import Outcome, Part, Planner, Setting

MACHINES = Path(__file__).parents[1] / "tests" / "fixtures" / "machines"

# Memory efficiency at which the plan meets published single-stream steps of tuned servers (docs/fast-verify.md).
EFFICIENCY = 0.4

# Class of machine -> (fixture, model that people run on it).
CLASSES: dict[str, tuple[str, str]] = {
    "as measured once: 205 us at 4 rows, 8 GPUs": ("dual-socket-direct", "kimi-k2.5"),
    "2 switches, 1 CPU, 8 GPUs": ("two-switches", "kimi-k2.5"),
    "direct, 2 sockets, 8 GPUs": ("dual-socket-direct", "kimi-k2.5"),
    "virtual switches that collapse, 2 sockets, 8 GPUs": (
        "dual-socket-virtual-switches",
        "kimi-k2.5",
    ),
    "1 switch, 8 GPUs": ("single-switch", "kimi-k2.5"),
    "4 switches, 16 GPUs": ("sixteen-four-islands", "kimi-k2.5"),
    "interleaved sockets, 6 GPUs": ("six-interleaved", "glm-5"),
    "workstation, 4 GPUs": ("workstation-4", "qwen3.5-397b"),
    "workstation, 3 GPUs": ("three-gpus", "minimax-m2.5"),
    "GeForce without peer access, 4 GPUs": ("geforce-no-p2p", "minimax-m2.5"),
    "peer traffic staged by the driver, 4 GPUs": ("staged-p2p", "qwen3.5-397b"),
}

STEPS: tuple[Part, ...] = (
    Part("as it comes", "as is"),
    Part("best draft length", "as is", best_length=True),
    Part("healthy fabric, tuned NCCL", "tuned"),
    Part("fused kernels", "fused"),
    Part("fused + prefetch", "fused", prefetch=True),
    Part("all + best draft length", "fused", prefetch=True, best_length=True),
)
BEGIN, END = "<!-- begin {name} -->", "<!-- end {name} -->"


# Classes that were measured: microseconds of a sum, and milliseconds of a pass without sums, by rows.
MEASURED: dict[str, tuple[dict[int, float], dict[int, float]]] = {
    "as measured once: 205 us at 4 rows, 8 GPUs": ({4: 205.0}, {4: 5.0}),
}


def outcomes(name: str, fixture: str, model: str) -> list[Outcome]:
    """Every step on one class of machine: batch 1, 3 drafts, stock NCCL or the measured sums."""
    box = simulate_machine.read(MACHINES / fixture)
    card = compute.card_named(box.gpus[0].name)
    points, compute_ms = MEASURED.get(name, ({}, {}))
    setting = Setting(
        machine=box,
        ranks=tuple(range(box.world)),
        model=shapes.read(model),
        roof=compute.Roof(card, box.world, efficiency=EFFICIENCY),
        points=points,
        compute_ms=compute_ms,
        stock=True,
    )
    return Planner(setting).outcomes(STEPS)


def tables(classes: dict[str, tuple[str, str]] = CLASSES) -> dict[str, str]:
    """Markdown tables by marker name."""
    speed = [
        "| machine | model | " + " | ".join(p.name for p in STEPS) + " |",
        "|---|---|" + "---:|" * len(STEPS),
    ]
    cost = [
        "| machine | us per sum: stock | tuned | ours (schedule) | verify ms: stock | tuned | ours + prefetch "
        "| break-even: stock | tuned | ours + prefetch | best drafts: stock | ours |",
        "|---|" + "---:|" * 11,
    ]
    for name, (fixture, model) in classes.items():
        got = outcomes(name, fixture, model)
        stock, _, tuned, fused, ours, best = got
        base = max(stock.plain_tps, 1e-9)
        cells = [
            f"{o.tps:.0f}" + (f" ({o.tps / stock.tps - 1:+.0%})" if o is not stock else "")
            for o in got
        ]
        speed.append(
            f"| {name} (plain {base:.0f}) | {shapes.read(model).name} | " + " | ".join(cells) + " |"
        )
        cost.append(
            f"| {name} | {stock.sum_us:.0f} | {tuned.sum_us:.0f} | {fused.sum_us:.0f} ({fused.schedule}) "
            f"| {stock.verify_ms:.1f} | {tuned.verify_ms:.1f} | {ours.verify_ms:.1f} "
            f"| {stock.plain_steps:.2f} | {tuned.plain_steps:.2f} | {ours.plain_steps:.2f} "
            f"| {stock.best_drafts} | {best.best_drafts} |"
        )
    return {"speed": "\n".join(speed), "cost": "\n".join(cost)}


def plot(path: Path) -> None:
    """Compute, sums and drafting of one speculative pass, step by step, on the measured class."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    name = next(iter(MEASURED))
    got = outcomes(name, *CLASSES[name])
    figure, axes = plt.subplots(figsize=(7.6, 3.6))
    labels = [f"{o.name}\n{o.drafts} drafts, {o.tps:.0f} tok/s" for o in got]
    left = [0.0] * len(got)
    for what, values in (
        ("compute", [o.compute_ms for o in got]),
        ("all-reduces", [o.sums_ms for o in got]),
        ("drafting", [o.draft_ms for o in got]),
    ):
        axes.barh(labels, values, left=left, label=what)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of one speculative pass (simulated, first sum measured)")
    axes.set_title(f"{shapes.read(CLASSES[name][1]).name}: {name}", fontsize=9)
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def placed(page: str, made: dict[str, str]) -> str:
    """The page with every table between its markers replaced."""
    for name, table in made.items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        if not rest or not tail:
            raise SystemExit(f"the page has no {begin} ... {end}")
        page = f"{head}{begin}\n{table}\n{end}{tail}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="put the tables into this page")
    parser.add_argument("--check", type=Path, help="compare the tables with this page")
    parser.add_argument("--plot", type=Path, help="write the picture of the page here")
    args = parser.parse_args()
    if args.plot:
        plot(args.plot)
        return
    made = tables()
    if args.check:
        page = args.check.read_text()
        if placed(page, made) != page:
            print(f"{args.check} is out of date: run {sys.argv[0]} --write {args.check}")
            raise SystemExit(1)
        print(f"{args.check} is up to date")
        return
    for table in made.values():
        print(table, end="\n\n")
    if args.write:
        args.write.write_text(placed(args.write.read_text(), made))


if __name__ == "__main__":
    main()
