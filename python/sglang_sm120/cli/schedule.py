"""`sglang-sm120 schedule`: print who sends what to whom in each hop, and where the bytes go."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_sm120.comm.schedule import (
    CUDA_PEER_LIMIT,
    SCHEDULES,
    Description,
    describe,
    slab_layout,
)


def _size(count: float) -> str:
    if count < 10_000:
        return f"{count:.0f} B"
    return f"{count / 1024:.1f} KiB"


def _times(count: float, message: int) -> str:
    return f"{count / message:.4g}x" if message else "-"


def _ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(str(r) for r in ranks)


def summary_table(descriptions: list[Description], title: str) -> Table:
    """One row per schedule: hops, partners, and the busiest rank, edge and island boundary."""
    table = Table(title=title, caption="x = multiples of the message; boundary = one direction")
    table.add_column("schedule")
    for column in (
        "hops",
        "partners",
        "stores",
        "sent per rank",
        "busiest edge",
        "busiest boundary",
    ):
        table.add_column(column, justify="right")
    for d in descriptions:
        edge = max(d.edges.items(), key=lambda item: item[1], default=((0, 0), 0))
        boundary = max(d.boundaries.values(), default=0)
        crowded = d.peers > CUDA_PEER_LIMIT
        table.add_row(
            d.schedule + (" (host memory)" if d.through_host else ""),
            str(d.hops),
            f"[red]{d.peers} > {CUDA_PEER_LIMIT}[/]" if crowded else str(d.peers),
            str(sum(f.tiles for f in d.flows)),
            f"{_size(max(d.egress))}  {_times(max(d.egress), d.message_bytes)}",
            f"{edge[0][0]} -> {edge[0][1]}  {_size(edge[1])}",
            f"{_size(boundary)}  {_times(boundary, d.message_bytes)}" if d.boundaries else "-",
        )
    return table


def hop_table(d: Description) -> Table:
    """One row per hop and kind of traffic, with the bytes inside islands and across."""
    table = Table(title=f"{d.schedule}: hop by hop")
    table.add_column("hop", justify="right")
    table.add_column("what travels")
    for column in ("edges", "stores", "inside islands", "across"):
        table.add_column(column, justify="right")
    what = {"reduce": "raw contributions", "cross": "island partials", "gather": "finished sums"}
    for hop in range(d.hops):
        for region, text in what.items():
            flows = [f for f in d.flows if f.hop == hop and f.region == region]
            if not flows:
                continue
            across = sum(f.bytes for f in flows if d.island_of[f.source] != d.island_of[f.target])
            table.add_row(
                str(hop),
                text,
                str(len(flows)),
                str(sum(f.tiles for f in flows)),
                _size(sum(f.bytes for f in flows) - across),
                _size(across),
            )
    return table


def edge_table(d: Description) -> Table:
    """Bytes over every edge: a row per sender, a column per receiver."""
    table = Table(title=f"{d.schedule}: bytes per edge", caption="rows send, columns receive")
    table.add_column("from", justify="right")
    for rank in range(d.world):
        table.add_column(str(rank), justify="right")
    table.add_column("all", justify="right")
    edges = d.edges
    for source in range(d.world):
        cells = []
        for target in range(d.world):
            count = edges.get((source, target), 0)
            across = d.island_of[source] != d.island_of[target]
            cells.append("." if not count else f"[bold]{count}[/]" if across else str(count))
        table.add_row(str(source), *cells, str(d.egress[source]))
    return table


def boundary_table(d: Description) -> Table:
    """Bytes over every island boundary, each direction apart."""
    table = Table(title=f"{d.schedule}: island boundaries")
    for column in ("from", "to", "bytes", "x message"):
        table.add_column(column, justify="right")
    for (source, target), count in d.boundaries.items():
        table.add_row(
            escape(f"[{_ranks(d.islands[source])}]"),
            escape(f"[{_ranks(d.islands[target])}]"),
            _size(count),
            _times(count, d.message_bytes),
        )
    return table


def command(
    world: Annotated[int, typer.Option(help="Ranks, 1 to 16.")] = 8,
    islands: Annotated[
        str, typer.Option(help='Partition of the ranks: "0-3;4-7"; empty is one island.')
    ] = "",
    rows: Annotated[int, typer.Option(help="Rows of the message.")] = 4,
    hidden: Annotated[int, typer.Option(help="Elements per row, a multiple of 8.")] = 7168,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    wire: Annotated[str, typer.Option(help="lossless or int8.")] = "lossless",
    fp32_partials: Annotated[bool, typer.Option(help="Exchange island partials as fp32.")] = False,
    schedule: Annotated[
        str, typer.Option(help=f"all, or one of {', '.join(SCHEDULES)} with every edge.")
    ] = "all",
) -> None:
    """Print hops, bytes per edge and the busiest link of a schedule, or compare all of them."""
    if schedule != "all" and schedule not in SCHEDULES:
        raise typer.BadParameter(f"{schedule!r} is not all or one of {', '.join(SCHEDULES)}")
    names = SCHEDULES if schedule == "all" else (schedule,)
    try:
        descriptions = [
            describe(
                name,
                world=world,
                rows=rows,
                hidden=hidden,
                islands=islands,
                dtype=dtype,
                wire=wire,
                fp32_partials=fp32_partials,
            )
            for name in names
        ]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(width=None if Console().is_terminal else 110)
    first = descriptions[0]
    layout = " + ".join(escape(f"[{_ranks(island)}]") for island in first.islands)
    title = (
        f"{rows} x {hidden} {dtype}, {_size(first.message_bytes)} per rank, {world} ranks: {layout}"
    )
    console.print(summary_table(descriptions, title))
    if schedule != "all":
        console.print(hop_table(first))
        console.print(edge_table(first))
        if first.boundaries:
            console.print(boundary_table(first))
    capacity = 1 << 20
    small = 32 << 10
    slab = slab_layout(world=world, capacity=capacity, small=small, islands=islands)
    console.print(
        f"slab for messages up to {_size(capacity)} (one-shot and two-hop up to {_size(small)}): "
        f"{_size(slab.control)} + {slab.slots} x ({_size(slab.reduce)} reduce + {_size(slab.cross)} cross"
        f" + {_size(slab.gather)} gather) = {slab.slab / 2**20:.2f} MiB",
        highlight=False,
    )
