"""`sglang-sm120 simulate`: how fast a schedule would be on a described PCIe machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape


def command(
    machine: Annotated[
        str,
        typer.Argument(help="A machine's TOML, a folder saved by `doctor`, or a name from --list."),
    ] = "",
    rows: Annotated[
        str,
        typer.Option(help="Rows of a call, comma separated; with --hidden they give the sizes."),
    ] = "1,2,4,8,16,32,64",
    hidden: Annotated[int, typer.Option(min=8, help="Elements of a row (bf16).")] = 7168,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            "--schedule", "-s", help="Schedules and rivals to show; all by default. Repeatable."
        ),
    ] = None,
    world: Annotated[int, typer.Option(min=0, help="Use the first N GPUs; 0 for all.")] = 0,
    timeline: Annotated[
        int, typer.Option(min=0, help="Show the hops of the call with this many rows.")
    ] = 0,
    healthy: Annotated[
        bool, typer.Option("--healthy", help="Leave out collapse rules and faults.")
    ] = False,
    kernel_us: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Our kernels' fixed time, if you measured it (launch, load, store)."
        ),
    ] = None,
    hop_us: Annotated[
        float | None,
        typer.Option(min=0.0, help="Our kernels' software time per hop, if you measured it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf).")] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List ready machines and schedules.")
    ] = False,
) -> None:
    """Latency over message size, busiest link and time line of each schedule, simulated.

    Example: sglang-sm120 simulate dual-socket-virtual-switches --timeline 4
    """
    from sglang_sm120.fabric import simulate, simulate_machine, simulate_report
    from sglang_sm120.fabric.machine import MachineError

    console = Console()
    if list_all or not machine:
        console.print("Machines: " + ", ".join(simulate_machine.ready()))
        console.print("Schedules: " + ", ".join(simulate.own_names()))
        console.print("Rivals: " + ", ".join(simulate.methods()))
        raise typer.Exit(0 if list_all else 2)
    try:
        box = simulate_machine.read(machine)
        if healthy:
            box = simulate.healthy(box)
        counts = sorted({int(r) for r in rows.split(",")} | ({timeline} if timeline else set()))
        if counts[0] < 1 or world > box.world:
            raise ValueError(f"rows must be positive and --world at most {box.world}")
        taking = tuple(range(world or box.world))
        costs = simulate.COSTS
        if kernel_us is not None:
            costs = msgspec.structs.replace(costs, fixed_us=kernel_us)
        if hop_us is not None:
            costs = msgspec.structs.replace(costs, hop_us=hop_us)
        sweep: dict[str, list[simulate.Estimate]] = {}
        for method in schedule or simulate.applicable(box, taking):
            sweep[method] = [
                simulate.any_method(box, method, n, hidden, taking, costs) for n in counts
            ]
    except (MachineError, simulate.SimulationError, ValueError, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(simulate_report.as_json(box, sweep).decode())
    else:
        headers = [str(n) for n in counts]
        console.print(simulate_report.latency_table(box, sweep, headers))
        console.print(simulate_report.busiest_table(sweep, headers))
        if timeline:
            for estimates in sweep.values():
                console.print(simulate_report.timeline_table(estimates[counts.index(timeline)]))
    if plot:
        simulate_report.plot(box, sweep, plot)
        if not as_json:
            console.print(f"Written to {plot}")
