"""`sglang-sm120 choices`: which backend and schedule would serve which rows, and the plans kept on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from sglang_sm120.comm import plan_cache, planner
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.plan import Plan, captured_rows
from sglang_sm120.fabric import machine
from sglang_sm120.fabric.report import vetoes
from sglang_sm120.fabric.software import probe_machine
from sglang_sm120.fabric.verdict import Verdict


def plan_machine(box: machine.Machine, hidden: int, rows: tuple[int, ...], pin: str = "") -> Plan:
    """The plan of a described machine, from a simulated probe and the cost model alone (bf16).

    Raises:
        PlanRefused: `pin` names a backend that cannot serve there.
    """
    request = planner.Request(
        group=box.name,
        world=box.world,
        hidden=hidden,
        itemsize=2,
        rows=rows,
        ops=(Op.ALL_REDUCE,),
        pin=pin,
    )
    report = probe_machine(box)
    verdict = Verdict(box.name)
    verdict.add(vetoes(report))
    islands = planner.choose_islands(report, request)
    return planner.make_plan(
        request,
        planner.own_candidates(islands, "native"),
        report=report,
        islands=islands,
        verdict=verdict,
        rank=0,
        exchange=lambda mine: [mine],
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f'"{text}" is not a list of whole numbers like 1,2,4') from None


def command(
    machine_file: Annotated[
        Path | None,
        typer.Option("--machine", help="A described machine (TOML): the plan is simulated."),
    ] = None,
    hidden: Annotated[int, typer.Option(min=1, help="Elements per row.")] = 7168,
    batch: Annotated[str, typer.Option(help="Captured batch sizes.")] = "1,2,4,8,16,32",
    tokens: Annotated[
        str, typer.Option(help="Tokens per request: 1, and the draft tokens of a verify step.")
    ] = "1,4",
    backend: Annotated[str, typer.Option(help="Pin a backend, as --sm120-backend does.")] = "",
    cache: Annotated[
        str,
        typer.Option(help="Folder of kept plans, as --sm120-plan-cache; shown without --machine."),
    ] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the plan of a described machine, or the plans that servers kept on this one."""
    console = Console()
    if machine_file is None:
        plans = [record.plan for record in _kept(plan_cache.folder(cache))]
        if not plans:
            console.print(
                "no kept plans: start a server with --enable-sm120-fusion, or give --machine"
            )
            raise typer.Exit(1)
    else:
        try:
            rows = captured_rows(_numbers(batch), _numbers(tokens))
            plans = [plan_machine(machine.load(machine_file), hidden, rows, backend)]
        except (OSError, ValueError, planner.PlanRefused, msgspec.MsgspecError) as error:
            console.print(str(error), style="bold red", soft_wrap=True)
            raise typer.Exit(3) from error
    for plan in plans:
        if json_:
            print(plan.to_json().decode())
            continue
        if machine_file is not None:
            console.print("simulated: the times below are the cost model's", style="yellow")
        console.print(plan.table())


def _kept(folder: Path | None) -> list[plan_cache.Record]:
    """Readable records of a cache folder, newest first."""
    records = []
    paths = sorted(folder.glob("*.json"), key=lambda p: -p.stat().st_mtime) if folder else []
    for path in paths:
        try:
            records.append(msgspec.json.decode(path.read_bytes(), type=plan_cache.Record))
        except msgspec.MsgspecError:
            continue  # written by another release: it will not be used either
    return records
