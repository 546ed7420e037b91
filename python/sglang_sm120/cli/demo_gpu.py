"""`sglang-sm120 demo --gpu`: servers with several ranks on one GPU, without and with the plugin, in one table."""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from sglang_sm120.sim import models, proxy, shared_gpu
from sglang_sm120.sim.gpu_trial import GpuOutcome, run_all, setups
from sglang_sm120.sim.models import Built

DEFAULT = ("plain", "eagle3", "plugin")


def run(
    model: str,
    ranks: int,
    servers: tuple[str, ...],
    *,
    prompts: int,
    tokens: int,
    turns: int,
    cache: Path | None,
    json: Path | None,
    flashinfer: str,
    folder: Path | None,
) -> None:
    """Serve with each of `servers` and print the table; exit status 1 when a token is wrong or a server failed."""
    console = Console(width=150)
    known = setups(flashinfer)
    unknown = [name for name in servers if name not in known]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    keep = folder is not None
    folder = folder or Path(tempfile.mkdtemp(prefix="sglang-sm120-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        shared_gpu.check()
        rig = shared_gpu.title(ranks)
        built = (
            proxy.build(cache=cache)
            if model == "kimi-proxy"
            else models.build("deepseek" if model == "deepseek" else "llama", cache)
        )
        chosen = [known[name] for name in servers]
        outcomes, failed = run_all(
            chosen, built, ranks, folder, count=prompts, new=tokens, turns=turns,
            on_outcome=lambda found, lost: _write(json, rig, built, found, lost),
        )  # fmt: skip
    except (shared_gpu.RigError, OSError) as error:
        console.print(f"[red]demo failed:[/] {error}", highlight=False)
        raise typer.Exit(1) from None
    if outcomes:
        console.print(table(built, outcomes, rig))
    for o in outcomes:
        for remark in o.remarks:
            console.print(f"{o.title}: {remark}", highlight=False, markup=False)
    problems = [*failed, *verdict(outcomes)]
    for problem in problems:
        console.print(f"✗ {problem}", style="red", highlight=False, markup=False)
    if problems:
        console.print(f"logs: {folder}", highlight=False)
        raise typer.Exit(1)
    if not keep:
        shutil.rmtree(folder)
    console.print("[green]✓ every answer of every server is the known text[/]")


def _write(
    path: Path | None, rig: str, built: Built, outcomes: list[GpuOutcome], failed: list[str]
) -> None:
    """The figures so far, after every server: a later one may hang."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "rig": f"{rig}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
        "model": {"family": built.family, "layers": built.layers, "hidden": built.hidden},
        "outcomes": outcomes,
        "problems": [*failed, *verdict(outcomes)],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))


def verdict(outcomes: list[GpuOutcome]) -> list[str]:
    """What is wrong, in sentences; empty when all is well."""
    problems = []
    for o in outcomes:
        if o.right != o.asked:
            problems.append(f"{o.title}: {o.asked - o.right} of {o.asked} answers are wrong")
        if o.death and "has died" not in o.death:
            problems.append(f"{o.title}: {o.death}")
        if o.name == "plugin" and not any(o.calls.values()):
            problems.append(f"{o.title}: our communicator was never called")
    return problems


def medians(outcomes: list[GpuOutcome]) -> list[GpuOutcome]:
    """One outcome per setup, in the order of their first turns: the turn with the median speed (the lower of two)."""
    by_name: dict[str, list[GpuOutcome]] = {}
    for o in outcomes:
        by_name.setdefault(o.name, []).append(o)
    return [
        sorted(turns, key=lambda o: o.tokens_per_s)[(len(turns) - 1) // 2]
        for turns in by_name.values()
    ]


def table(built: Built, every: list[GpuOutcome], rig: str) -> Table:
    """The servers side by side; ratios are to the server of plain EAGLE-3 (the first server if that is missing).

    Of a setup that was served several times: the turn with the median speed, and the speed of each turn.
    """
    outcomes = medians(every)
    base = next((o for o in outcomes if o.name == "eagle3"), outcomes[0])
    out = Table(
        title=f"{built.family}, {built.layers} layers, hidden {built.hidden}, CUDA graphs ({rig}; "
        "ranks meet in the GPU's memory, not on PCIe)",
    )
    out.add_column("")
    for o in outcomes:
        out.add_column(o.title, justify="right")

    def row(title: str, cells: list[str]) -> None:
        out.add_row(title, *cells)

    def ratio(mine: float | None, theirs: float | None, text: str) -> str:
        if mine is None:
            return "-"
        return f"{mine:{text}}" + (f" ({mine / theirs:.2f}x)" if theirs else "")

    def of_passes(title: str, name: str) -> None:
        reference = getattr(base.passes, name, None)
        row(title, [ratio(getattr(o.passes, name, None), reference, ".3f") for o in outcomes])

    row("answers equal to the known text", [f"{o.right}/{o.asked}" for o in outcomes])
    row("tokens/s, one request", [ratio(o.tokens_per_s, base.tokens_per_s, ".0f") for o in outcomes])  # fmt: skip
    if len(every) > len(outcomes):
        speeds = {o.name: [e.tokens_per_s for e in every if e.name == o.name] for o in outcomes}
        row("  of each turn", [" ".join(f"{s:.0f}" for s in speeds[o.name]) for o in outcomes])
    row("accept length", [ratio(o.accept_length, None, ".2f") for o in outcomes])
    row("serving per verify pass, ms", [ratio(o.pass_ms, base.pass_ms, ".2f") for o in outcomes])
    of_passes("verify pass on the device, ms", "span")
    of_passes("  communication, ms", "communication")
    of_passes("  all-reduces without waiting, ms", "transfer")
    of_passes("  norms after sums, ms", "norms")
    of_passes("  idle, ms", "idle")
    row("  all-reduces", ["-" if o.passes is None else _by(o) for o in outcomes])
    row("main threads of the ranks, cores", [_hosts(o, "main") for o in outcomes])
    row("their other threads, cores", [_hosts(o, "others") for o in outcomes])
    row("stolen by other machines, cores", ["-" if o.host is None else f"{o.host.stolen:.2f}" for o in outcomes])  # fmt: skip
    row("server ready after, s", [f"{o.start_s:.0f}" for o in outcomes])
    return out


def _by(outcome: GpuOutcome) -> str:
    assert outcome.passes is not None
    return "\n".join(f"{n} x {us:.1f} us {who}" for who, (n, us) in outcome.passes.by.items())


def _hosts(outcome: GpuOutcome, name: str) -> str:
    if outcome.host is None:
        return "-"
    return " ".join(f"{getattr(rank, name):.2f}" for rank in outcome.host.ranks)
