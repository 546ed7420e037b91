"""`sglang-sm120 demo`: a real SGLang server three times on this machine's CPU, and whether the plugin changes a token.

Plain decoding, EAGLE-3, and EAGLE-3 with the plugin's fused sums answer the same prompts. Exit status 1 when a token
differs, when fewer sums were fused than SGLang leaves to fuse, or when gloo still summed anything.
"""

from __future__ import annotations

import shutil
import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_sm120.sim import models
from sglang_sm120.sim.server import ServerError, eagle3_flags
from sglang_sm120.sim.train import TrainingError
from sglang_sm120.sim.trial import Outcome, run_trial

PLAIN, EAGLE, FUSED = "plain", "eagle3", "eagle3-fused"
_TITLES = {PLAIN: "plain", EAGLE: "EAGLE-3", FUSED: "EAGLE-3 + --enable-sm120-fusion"}


class FamilyName(str, Enum):
    """Which tiny target is served."""

    deepseek = "deepseek"
    llama = "llama"
    kimi_proxy = "kimi-proxy"


def command(
    model: Annotated[
        FamilyName,
        typer.Option(
            help="DeepSeek-V3 style (MLA + experts, as Kimi-K2.5) or Llama; with --gpu also Kimi-K2.5's true shapes."
        ),
    ] = FamilyName.deepseek,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Run all ranks on this machine's first GPU, under MPS.")
    ] = False,
    ranks: Annotated[int, typer.Option(min=2, max=8, help="Ranks with --gpu.")] = 2,
    servers: Annotated[
        str,
        typer.Option(help="Servers with --gpu: plain, eagle3, pcie_ipc, kernels, compact, plugin."),
    ] = "plain,eagle3,plugin",
    flashinfer: Annotated[
        str, typer.Option(help="Folder with FlashInfer for pcie_ipc, if it is not installed.")
    ] = "",
    logs: Annotated[
        Path | None, typer.Option(help="Keep logs and traces of --gpu in this folder.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=64, help="Prompts sent to each server.")] = 16,
    tokens: Annotated[int, typer.Option(min=8, max=96, help="Tokens per answer.")] = 64,
    turns: Annotated[
        int, typer.Option(min=1, max=9, help="Serve each of --servers so often, with --gpu.")
    ] = 1,
    cache: Annotated[
        Path | None,
        typer.Option(help="Where the models are kept; ~/.cache/sglang-sm120 if not given."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file too.")] = None,
) -> None:
    """Serve a tiny model three times (plain, EAGLE-3, EAGLE-3 + the plugin) and compare every token."""
    if gpu:
        from sglang_sm120.cli import demo_gpu

        demo_gpu.run(
            model.value, ranks, tuple(servers.split(",")), prompts=min(prompts, 8), tokens=tokens, turns=turns,
            cache=cache, json=json, flashinfer=flashinfer, folder=logs,
        )  # fmt: skip
        return
    if model is FamilyName.kimi_proxy:
        raise typer.BadParameter("kimi-proxy needs --gpu: a CPU would take hours for it")
    console = Console()
    family: models.Family = "deepseek" if model is FamilyName.deepseek else "llama"
    folder = Path(tempfile.mkdtemp(prefix="sglang-sm120-demo-"))
    try:
        built, outcomes = _run(console, family, prompts, tokens, cache, folder)
    except (ServerError, TrainingError, OSError) as error:
        console.print(f"[red]demo failed:[/] {error}\nlogs: {folder}", highlight=False)
        raise typer.Exit(1) from None
    problems = verdict(built, outcomes)
    console.print(table(built, outcomes))
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"model": built, "outcomes": outcomes, "problems": problems}
        json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    for problem in problems:
        console.print(f"[red]✗ {problem}[/]", highlight=False)
    if problems:
        console.print(f"logs: {folder}", highlight=False)
        raise typer.Exit(1)
    shutil.rmtree(folder)
    console.print(
        f"[green]✓ all {prompts} answers are identical, token by token, and every sum SGLang leaves to fuse "
        "was fused[/]"
    )


def _run(
    console: Console,
    family: models.Family,
    prompts: int,
    tokens: int,
    cache: Path | None,
    folder: Path,
) -> tuple[models.Built, list[Outcome]]:
    outcomes = []
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        training = progress.add_task("models", total=1.0, state="")
        built = models.build(
            family,
            cache,
            lambda done, what: progress.update(training, completed=done, state=what),
        )
        cases = built.cases(prompts, new=tokens)
        speculative = eagle3_flags(built.drafter)
        for name, flags in (
            (PLAIN, []),
            (EAGLE, speculative),
            (FUSED, [*speculative, "--enable-sm120-fusion"]),
        ):
            task = progress.add_task(_TITLES[name], total=None, state="server starts")
            outcome = run_trial(
                name,
                built,
                cases,
                flags,
                folder=folder,
                on_ready=lambda task=task: progress.update(  # type: ignore[misc]
                    task, total=prompts, state="prompts"
                ),
                on_answer=lambda task=task: progress.advance(task),  # type: ignore[misc]
            )
            progress.update(task, completed=prompts, state=f"{outcome.serve_s:.1f} s of serving")
            outcomes.append(outcome)
    return built, outcomes


def fusable_sums(built: models.Built) -> int:
    """Sums of one verify pass that are followed by residual add + RMSNorm with nothing in between.

    Of a decoder's 2 L sums, the last FFN's goes to the final norm without fusion. SGLang's Llama also completes the
    sum before each captured layer early, to hand the drafter the captured state.
    """
    early = len(built.aux_layers) if built.family == "llama" else 0
    return 2 * built.layers - 1 - early


def verdict(built: models.Built, outcomes: list[Outcome]) -> list[str]:
    """What is wrong, in sentences; empty when the demo holds."""
    by_name = {outcome.name: outcome for outcome in outcomes}
    plain, eagle, fused = by_name[PLAIN], by_name[EAGLE], by_name[FUSED]
    problems = [
        f"{_TITLES[other.name]}: answer {number} differs from plain decoding"
        for other in (eagle, fused)
        for number, (answer, reference) in enumerate(zip(other.answers, plain.answers))
        if answer != reference
    ]
    if plain.right != len(plain.answers):
        problems.append(
            f"plain decoding gave the known text in {plain.right} of {len(plain.answers)} answers"
        )
    needed = fusable_sums(built)
    if fused.fused_per_pass < needed:
        problems.append(
            f"{fused.fused_per_pass:.2f} sums per {fused.forward} pass were fused, {needed} can be"
        )
    if fused.gloo_total:
        problems.append(f"gloo did {fused.gloo_total} all-reduces in the fused run, 0 are allowed")
    return problems


def table(built: models.Built, outcomes: list[Outcome]) -> Table:
    """The three runs side by side."""
    plain = outcomes[0]
    out = Table(
        title=f"SGLang on this machine's CPU, TP 2, {built.family} target with {built.layers} layers "
        f"(rig: CPU server, simulated platform sm120_sim; times say nothing about GPUs)",
    )
    out.add_column("")
    for outcome in outcomes:
        out.add_column(_TITLES[outcome.name], justify="right")

    def row(title: str, cells: list[str]) -> None:
        out.add_row(title, *cells)

    count = len(plain.answers)
    same = [sum(a == b for a, b in zip(o.answers, plain.answers)) for o in outcomes]
    row("answers equal to plain", [_good(n, count) for n in same])
    row("answers equal to the known text", [_good(o.right, count) for o in outcomes])
    row(
        "accept length",
        ["-" if o.accept_length is None else f"{o.accept_length:.2f}" for o in outcomes],
    )
    row("target passes", [f"{o.passes} {o.forward}" for o in outcomes])
    for title, kind in (
        ("sums per pass: fused, attention", "fused_attention_sum"),
        ("sums per pass: fused, FFN", "fused_ffn_sum"),
        ("sums per pass: ours, plain", "plain"),
        ("sums per pass: gloo", "gloo"),
    ):
        row(title, [f"{o.sums_per_pass.get(kind, 0.0):.2f}" for o in outcomes])
    row("fused per pass", [f"{o.fused_per_pass:.2f} of {fusable_sums(built)}" for o in outcomes])
    row("gloo all-reduces in all passes", [str(o.gloo_total) for o in outcomes])
    row("server start, s", [f"{o.start_s:.1f}" for o in outcomes])
    row("serving, s", [f"{o.serve_s:.1f}" for o in outcomes])
    row("tokens per second", [f"{o.tokens / o.serve_s:.1f}" for o in outcomes])
    return out


def _good(part: int, whole: int) -> str:
    return f"[{'green' if part == whole else 'red'}]{part}/{whole}[/]"
