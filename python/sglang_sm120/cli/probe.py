"""`sglang-sm120 probe`: what the edges do under the kernels' own traffic."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from sglang_sm120.fabric import machine, screen
from sglang_sm120.fabric.driver import EdgeDriver
from sglang_sm120.fabric.host_driver import HostDriver
from sglang_sm120.fabric.probe import FAST, FULL, Effort, run
from sglang_sm120.fabric.report import ProbeReport, vetoes
from sglang_sm120.fabric.software import LIGHT, probe_machine
from sglang_sm120.fabric.source import Live
from sglang_sm120.fabric.topology import discover


class PipeExchange:
    """all_gather between processes over pipes: rank 0 gathers and hands the list back."""

    def __init__(self, rank: int, links: list[Any]) -> None:
        self.rank = rank
        self.links = links

    def __call__(self, mine: Any) -> list[Any]:
        if self.rank:
            self.links[0].send(mine)
            told: list[Any] = self.links[0].recv()
            return told
        told = [mine, *(link.recv() for link in self.links)]
        for link in self.links:
            link.send(told)
        return told


def _driver(rig: str, rank: int, world: int, session: str, exchange: PipeExchange) -> EdgeDriver:
    if rig == "host":
        return HostDriver.join(rank, world, session, exchange)
    import torch

    from sglang_sm120.comm.cuda_library import cuda_library
    from sglang_sm120.fabric.gpu_driver import GpuDriver

    torch.cuda.set_device(rank)
    return GpuDriver.join(rank, world, exchange, library=cuda_library(), device=rank)


def _rank(
    rig: str, rank: int, world: int, session: str, links: list[Any], effort: Effort, out: Any
) -> None:
    exchange = PipeExchange(rank, links)
    driver = _driver(rig, rank, world, session, exchange)
    report = run(driver, exchange, effort, [discover(Live()).islands()])
    if rank == 0:
        out.send(report)


def probe_here(rig: str, world: int, effort: Effort) -> ProbeReport:
    """Probe this machine with one process per rank.

    Args:
        rig: "gpu" (rank r on CUDA device r) or "host" (processes over shared memory).

    Raises:
        RuntimeError: a rank ended early; its own error is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(1, world)]
    mine, theirs = context.Pipe(duplex=False)
    session = f"cli-{os.getpid()}"
    ranks = [
        context.Process(
            target=_rank,
            args=(
                rig,
                r,
                world,
                session,
                [p[0] for p in pipes] if r == 0 else [pipes[r - 1][1]],
                effort,
                theirs,
            ),
        )
        for r in range(world)
    ]
    for p in ranks:
        p.start()
    # A rank that dies closes nothing here, so its end is watched beside the answer.
    ready = multiprocessing.connection.wait([mine, *(p.sentinel for p in ranks)])
    while mine not in ready and all(p.exitcode in (None, 0) for p in ranks):
        ready = multiprocessing.connection.wait(
            [mine, *(p.sentinel for p in ranks if p.exitcode is None)]
        )
    if mine not in ready:
        for p in ranks:
            p.kill()
        dead = [r for r, p in enumerate(ranks) if p.exitcode not in (None, 0)]
        raise RuntimeError(f"ranks {dead} ended while probing; their errors are above")
    report: ProbeReport = mine.recv()
    for p in ranks:
        p.join()
    return report


def command(
    machine_file: Annotated[
        Path | None,
        typer.Option("--machine", help="A described machine (TOML): the probe is simulated."),
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="A folder with fabric.toml, as --machine.")
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=0, max=16, help="Probe this many processes over host memory.")
    ] = 0,
    full: Annotated[
        bool, typer.Option("--full", help="More rounds, larger messages, loads as well.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Probe all GPUs of this machine, or a described machine, or this machine's host memory.

    A server probes its GPUs by itself at warm-up. Exit status: 0 sound, 2 an edge must not be used.
    """
    console = Console()
    effort = FULL if full else FAST
    path = machine_file or (from_ / "fabric.toml" if from_ else None)
    try:
        if path:
            report = probe_machine(machine.load(path), FULL if full else LIGHT)
        elif ranks > 1:
            report = probe_here("host", ranks, effort)
        else:
            gpus = len(discover(Live()).gpus)
            if gpus < 2:
                raise ValueError(
                    f"{gpus} GPUs here; say what to probe: --machine FILE, --from FOLDER, or --ranks 2 or more"
                )
            report = probe_here("gpu", gpus, effort)
    except (OSError, ValueError, RuntimeError, msgspec.MsgspecError) as error:
        console.print(str(error), style="bold red", soft_wrap=True)
        raise typer.Exit(3) from error
    found = vetoes(report)
    if json_:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        if report.latency_us:
            console.print(screen.measured_matrix(report))
        if report.patterns:
            console.print(screen.patterns(report))
        for veto in found:
            console.print(f"veto: {veto.reason}", style="bold red", soft_wrap=True, markup=False)
            console.print(f"fix:  {veto.remedy}", style="bold", soft_wrap=True, markup=False)
        console.print(f"{report.seconds:.2f} s, {'sound' if not found else 'not sound'}")
    raise typer.Exit(2 if found else 0)
