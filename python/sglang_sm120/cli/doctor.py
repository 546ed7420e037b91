"""`sglang-sm120 doctor`: what is wrong with this machine, what it costs, the line that fixes it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from sglang_sm120.fabric import doctor, screen
from sglang_sm120.fabric.findings import Finding
from sglang_sm120.fabric.report import ProbeReport
from sglang_sm120.fabric.source import Live, Recording, Saved, SourceError
from sglang_sm120.fabric.topology import Topology, discover
from sglang_sm120.fabric.versions import installed
from sglang_sm120.nccl import environment


def as_json(topology: Topology, findings: list[Finding], code: int) -> str:
    """The whole result for scripts."""
    out: dict[str, Any] = {
        "exit_code": code,
        "findings": msgspec.to_builtins(findings),
        "topology": msgspec.to_builtins(topology),
    }
    return json.dumps(out, indent=2)


def command(
    from_: Annotated[
        Path | None, typer.Option("--from", help="Read a saved folder instead of this machine.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write what was read to a folder, for support.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    probe: Annotated[
        Path | None, typer.Option(help="A report of `sglang-sm120 probe --json` to judge as well.")
    ] = None,
) -> None:
    """Show the PCIe tree, the edges between GPUs, and what is wrong. Needs no root.

    Exit status: 0 nothing wrong, 1 something costs speed, 2 something corrupts, hangs or disables.
    """
    console = Console()
    try:
        source = Recording(Saved(from_) if from_ else Live())
        topology = discover(source)
        if save:
            source.save(save)
        report = msgspec.json.decode(probe.read_bytes(), type=ProbeReport) if probe else None
    except (SourceError, OSError, msgspec.MsgspecError) as error:
        console.print(str(error), style="bold red", soft_wrap=True)
        raise typer.Exit(3) from error
    # Another machine's folder says nothing about the environment and packages of this one.
    versions = installed(topology.driver) if not from_ else None
    wrong = (
        environment.check(
            os.environ,
            nccl_version=versions.nccl,
            nccl_cuda=versions.nccl_cuda,
            world=len(topology.gpus),
            sm120=False,
        )
        if versions
        else []
    )
    findings = doctor.diagnose(topology, versions=versions, environment=wrong, report=report)
    code = doctor.exit_code(findings)
    if json_:
        print(as_json(topology, findings, code))
    else:
        console.print(screen.screen(topology, findings, report))
    raise typer.Exit(code)
