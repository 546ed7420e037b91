"""How simulated latencies are shown: tables, JSON, and a picture of latency over message size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from sglang_sm120.fabric.machine import Machine
from sglang_sm120.fabric.simulate import Estimate

Sweep = Mapping[str, Sequence[Estimate]]  # method -> one estimate per size, ascending


def size_text(nbytes: int) -> str:
    """A message size for a column header: "14 KiB", "1 MiB"."""
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):.3g} MiB"
    return f"{nbytes / 1024:.3g} KiB" if nbytes >= 1024 else f"{nbytes} B"


def latency_table(machine: Machine, sweep: Sweep, headers: Sequence[str]) -> Table:
    """Microseconds per method and size; the fastest of a size is bold."""
    out = Table(title="Simulated latency (us) by rows", title_justify="left", caption=machine.title)
    out.add_column("schedule", no_wrap=True)
    for header in headers:
        out.add_column(header, justify="right")
    best = [min(e[i].total_us for e in sweep.values()) for i in range(len(headers))]
    for method, estimates in sweep.items():
        out.add_row(
            method,
            *(
                f"[bold]{e.total_us:.1f}[/]" if e.total_us == best[i] else f"{e.total_us:.1f}"
                for i, e in enumerate(estimates)
            ),
        )
    return out


def busiest_table(sweep: Sweep, headers: Sequence[str]) -> Table:
    """For each method the link direction needed longest at the largest size, and the busiest link's share by size."""
    out = Table(
        title="Busiest link: share of the call for which it is needed at full rate",
        title_justify="left",
    )
    out.add_column("schedule", no_wrap=True)
    out.add_column(f"link at {headers[-1]}", no_wrap=True)
    for header in headers:
        out.add_column(header, justify="right")
    for method, estimates in sweep.items():
        last = estimates[-1].busiest
        out.add_row(
            method,
            last.link if last else "-",
            *(
                f"{e.busiest.nbytes / (e.busiest.bandwidth * 1e3 * e.total_us):.0%}"
                if e.busiest
                else "-"
                for e in estimates
            ),
        )
    return out


def timeline_table(one: Estimate, width: int = 48) -> Table:
    """When each hop of one call runs, drawn to scale; the fixed part stands in front."""
    out = Table(
        title=f"{one.method} {one.label}, {size_text(one.nbytes)}: {one.total_us:.1f} us, "
        f"of which {one.fixed_us:.1f} us fixed"
    )
    for column in ("hop", "transfers", "bytes", "from us", "to us", "time line"):
        out.add_column(column, justify="left" if column == "time line" else "right")
    scale = width / one.total_us if one.total_us else 0.0
    out.add_row("fixed", "", "", "0.0", f"{one.fixed_us:.1f}", "▒" * round(one.fixed_us * scale))
    for hop in one.hops:
        begin, end = hop.start_us + one.fixed_us, hop.end_us + one.fixed_us
        first = round(begin * scale)
        out.add_row(
            str(hop.hop),
            str(hop.transfers),
            f"{hop.nbytes:,}",
            f"{begin:.1f}",
            f"{end:.1f}",
            " " * first + "█" * max(1, round(end * scale) - first),
        )
    return out


def as_json(machine: Machine, sweep: Sweep) -> bytes:
    """The whole sweep as JSON, link loads and time lines included."""
    body: dict[str, Any] = {
        "machine": machine.name,
        "title": machine.title,
        "kind": "simulated",
        "estimates": [e for estimates in sweep.values() for e in estimates],
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=1)


def plot(machine: Machine, sweep: Sweep, path: Path) -> None:
    """Latency over message size, one line per method; the format follows the file's suffix.

    Raises:
        ValueError: matplotlib does not know the suffix.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.6))
    for method, estimates in sweep.items():
        axes.plot(
            [e.nbytes / 1024 for e in estimates],
            [e.total_us for e in estimates],
            marker="o",
            markersize=3,
            linewidth=1.2,
            label=method,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="message per rank (KiB)",
        ylabel="simulated latency (us)",
    )
    axes.set_title(machine.title, fontsize=9)
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
