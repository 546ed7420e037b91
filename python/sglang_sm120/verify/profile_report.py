"""The profile as tables on a terminal, as plain data, and as a picture of one pass."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_sm120.verify.profile import KindReport, Profile
from sglang_sm120.verify.savings import Saving
from sglang_sm120.verify.trace import Pass

COLOURS = {
    "all-reduce": "#d1495b",
    "other communication": "#edae49",
    "norm": "#66a182",
    "compute": "#2e4057",
}


def ms(us: float) -> str:
    """Microseconds as milliseconds: one digit from 1 ms, three below."""
    return f"{us / 1e3:.1f} ms" if us >= 1e3 else f"{us / 1e3:.3f} ms"


def size(count: int) -> str:
    """Bytes in KiB."""
    return f"{count / 1024:.1f} KiB" if count else "size not in the trace"


def print_profile(profile: Profile, console: Console) -> None:
    """All tables but the savings."""
    for kind in profile.main.values():
        _print_kind(kind, console)
    _print_skew(profile, console)
    if profile.gap_us:
        console.print(f"Between passes the device waits {ms(profile.gap_us)} on average.")


def _print_kind(kind: KindReport, console: Console) -> None:
    typical = kind.typical
    name = f"{kind.kind} batch {typical.batch}" if typical.batch else kind.kind
    console.print(
        f"\n[bold]{name}[/bold]: {len(kind.passes)} passes of {ms(kind.mean('span'))}, "
        f"{kind.all_reduces} all-reduces each: communication {ms(kind.mean('communication'))}, "
        f"compute {ms(kind.mean('compute'))}, idle {ms(kind.mean('idle'))}"
    )
    if kind.mean("hidden") > 0.005 * kind.mean("span"):
        console.print(f"  {ms(kind.mean('hidden'))} of the communication runs under compute")
    sums = Table("all-reduce", "size", "per pass", "each", "total", box=None)
    for who, bytes_, count, us in kind.all_reduce_kinds():
        sums.add_row(who, size(bytes_), str(count), f"{us:.1f} us", ms(count * us))
    if typical.segments:
        console.print(sums)
        console.print(_layer_table(kind))
    others: dict[tuple[str, str], list[float]] = {}
    for operation, who, us in typical.others:
        others.setdefault((operation, who), []).append(us)
    for (operation, who), times in others.items():
        console.print(
            f"  also {len(times)} x {operation} ({who}), {statistics.fmean(times):.1f} us each"
        )


def layer_rows(kind: KindReport) -> list[dict[str, Any]]:
    """Per layer of the typical pass: communication, compute and idle, microseconds."""
    layers: dict[int, dict[str, Any]] = {}
    for segment in kind.typical.segments:
        row = layers.setdefault(
            segment.layer,
            {"layer": segment.layer, "communication": 0.0, "compute": 0.0, "idle": 0.0},
        )
        row["communication"] += segment.us
        row["compute"] += segment.before.compute
        row["idle"] += segment.before.idle
    return [layers[key] for key in sorted(layers)]


def _layer_table(kind: KindReport) -> Table:
    rows = [r for r in layer_rows(kind) if r["layer"] >= 0]
    table = Table("per layer", "communication", "compute", "idle", box=None)
    for label, pick in (("mean", statistics.fmean), ("least", min), ("most", max)):
        cells = [
            f"{pick([r[k] for r in rows]):.1f} us" for k in ("communication", "compute", "idle")
        ]
        table.add_row(f"{label} of {len(rows)}", *cells)
    worst = max(rows, key=lambda r: r["communication"])
    table.add_row(
        f"layer {worst['layer']}",
        *(f"{worst[k]:.1f} us" for k in ("communication", "compute", "idle")),
    )
    return table


def _print_skew(profile: Profile, console: Console) -> None:
    for kind, skew in profile.skew.items():
        waits = ", ".join(f"rank {r} {ms(us)}" for r, us in sorted(skew.waiting.items()))
        console.print(
            f"\n{kind}: {ms(skew.transfer)} of the all-reduce time is transfer; the rest is waiting "
            f"for other ranks: {waits}. Rank {skew.late} is the one the others wait for."
        )
    for slow in profile.slow:
        console.print(slow.sentence())


def print_savings(found: Sequence[Saving], span_us: float, console: Console) -> None:
    """What each part would save."""
    table = Table(
        "part", "saves per pass", "share", "basis", title="What the plugin would save (estimates)"
    )
    for saving in found:
        if saving.us is None:
            table.add_row(saving.part, "unknown", "", saving.basis)
        else:
            table.add_row(saving.part, ms(saving.us), f"{saving.us / span_us:.0%}", saving.basis)
    console.print(table)


def as_data(profile: Profile, found: Sequence[Saving]) -> dict[str, Any]:
    """The same as JSON-able data; times in microseconds."""
    return {
        "ranks": {
            str(rank): {
                kind: {
                    "passes": len(report.passes),
                    "batch": report.typical.batch,
                    "all_reduces": report.all_reduces,
                    **{
                        part: report.mean(part)
                        for part in (
                            "span",
                            "communication",
                            "exposed",
                            "hidden",
                            "compute",
                            "idle",
                        )
                    },
                    "all_reduce_kinds": report.all_reduce_kinds(),
                    "layers": layer_rows(report),
                }
                for kind, report in kinds.items()
            }
            for rank, kinds in profile.ranks.items()
        },
        "skew": {
            kind: {"transfer": s.transfer, "waiting": s.waiting, "late": s.late}
            for kind, s in profile.skew.items()
        },
        "slow_processors": [{"rank": s.rank, "times": s.times} for s in profile.slow],
        "gap": profile.gap_us,
        "savings": [{"part": s.part, "us": s.us, "basis": s.basis} for s in found],
    }


def _kind_of(item: Any) -> str:
    if item.operation == "all-reduce":
        return "all-reduce"
    if item.operation:
        return "other communication"
    return "norm" if item.norm else "compute"


def draw_pass(item: Pass, path: Path, *, title: str, rows: int = 6) -> None:
    """Draw one pass as a stacked time line: the pass is folded into rows, one bar per kernel.

    Args:
        item: the pass.
        path: image file; the ending decides the format.
        title: names the rig.
        rows: how many rows the pass is folded into.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    start, end = item.start, item.end
    width = (end - start) / rows
    streams = sorted({w.stream for w in item.work})
    figure, axes = plt.subplots(figsize=(11, 0.8 + 0.75 * rows), constrained_layout=True)
    height = 0.8 / len(streams)
    for row in range(rows):
        low, high = start + row * width, start + (row + 1) * width
        for lane, stream in enumerate(streams):
            bars: dict[str, list[tuple[float, float]]] = {}
            for w in item.work:
                if w.stream == stream and w.end > low and w.start < high:
                    left = max(w.start, low) - low
                    bars.setdefault(_kind_of(w), []).append(
                        (left / 1e3, (min(w.end, high) - low - left) / 1e3)
                    )
            for kind, spans in bars.items():
                axes.broken_barh(
                    spans, (row + lane * height, height * 0.95), color=COLOURS[kind], linewidth=0
                )
    axes.set_yticks(
        [r + 0.4 for r in range(rows)],
        [f"+{r * width / 1e3:.1f} ms" for r in range(rows)],
        fontsize=8,
    )
    axes.set_xlim(0, width / 1e3)
    axes.set_ylim(rows, -0.2)
    axes.set_xlabel("milliseconds within the row")
    axes.set_title(title, fontsize=10)
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in COLOURS.values()]
    handles.append(plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="#999999"))
    figure.legend(
        handles, [*COLOURS, "idle"], loc="outside lower center", ncols=5, fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
