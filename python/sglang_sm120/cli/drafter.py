"""`sglang-sm120 drafter`: does an EAGLE-3 drafter fit a target, move its head to another vocabulary, measure it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

_COLOUR = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def _fail(error: Exception) -> typer.Exit:
    Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}")
    return typer.Exit(2)


@app.command()
def check(
    target: Annotated[Path, typer.Argument(help="The target's checkpoint folder.")],
    draft: Annotated[Path, typer.Argument(help="The drafter's checkpoint folder.")],
    against: Annotated[
        Path | None,
        typer.Option(help="Another drafter (or its mapping) to compare draft positions with."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text that the target writes; its tokens are counted for coverage."),
    ] = None,
    counts: Annotated[
        Path | None, typer.Option(help='Token counts as JSON {"id": count} instead of --text.')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether the drafter fits the target. Exit code 0: it fits, 1: it does not, 2: nothing could be read."""
    from sglang_sm120.foresight import drafter_check, mapping
    from sglang_sm120.foresight.checkpoint import Checkpoint, CheckpointError

    try:
        done = drafter_check.check(
            Checkpoint(target),
            Checkpoint(draft),
            against=mapping.read(against) if against else None,
            counts=_counts(target, text, counts),
        )
    except CheckpointError as error:
        raise _fail(error) from error
    if as_json:
        typer.echo(json.dumps({"fits": done.fits, "findings": msgspec.to_builtins(done.findings)}))
    else:
        table = Table(title=f"{escape(str(draft))} for {escape(str(target))}")
        for column in ("", "checked", "seen", "do"):
            table.add_column(column)
        for f in done.findings:
            table.add_row(
                f"[{_COLOUR[f.level]}]{f.level}[/]", f.name, escape(f.text), escape(f.remedy)
            )
        console = Console()
        console.print(table)
        console.print(
            "The drafter fits." if done.fits else "[bold red]The drafter does not fit.[/]"
        )
    raise typer.Exit(0 if done.fits else 1)


def _counts(target: Path, text: Path | None, counts: Path | None) -> dict[int, int] | None:
    from sglang_sm120.foresight.checkpoint import CheckpointError
    from sglang_sm120.foresight.mapping import count_tokens

    if counts is not None:
        return {int(k): int(v) for k, v in json.loads(counts.read_text()).items()}
    if text is None:
        return None
    file = target / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{target} has no tokenizer.json to count tokens with: give --counts")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CheckpointError(
            "counting tokens needs the package tokenizers, which SGLang brings: give --counts instead"
        ) from error
    ids = Tokenizer.from_file(str(file)).encode(text.read_text(), add_special_tokens=False).ids
    return count_tokens(ids)


@app.command()
def remap(
    draft: Annotated[Path, typer.Argument(help="The drafter whose head is rewritten.")],
    onto: Annotated[
        Path,
        typer.Argument(
            help="The mapping wanted: another drafter's folder, .safetensors, .pt or .json."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="New folder for the result.")],
    target: Annotated[
        Path | None,
        typer.Option(help="Take rows without a source from this target's head."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rewrite the draft head for another draft vocabulary and say which rows have no source."""
    from sglang_sm120.foresight import drafter_remap, mapping
    from sglang_sm120.foresight.checkpoint import Checkpoint, CheckpointError

    try:
        done = drafter_remap.remap(
            Checkpoint(draft),
            mapping.read(onto),
            out,
            target=Checkpoint(target) if target else None,
        )
    except CheckpointError as error:
        raise _fail(error) from error
    if as_json:
        typer.echo(msgspec.json.encode(done).decode())
        return
    console = Console()
    console.print(f"{done.moved:,} of {done.rows:,} rows moved to their token's new position.")
    if done.without_source:
        shown = ", ".join(str(t) for t in done.without_source[:20])
        more = len(done.without_source) - 20
        source = "the target's head" if done.fill == "target" else "the mean of all rows"
        console.print(
            f"{len(done.without_source):,} rows have no source and were filled from {source}: tokens {shown}"
            + (f" and {more:,} more (--json lists all)" if more > 0 else "")
        )
    console.print(f"Written to {out}")


@app.command()
def measure(
    prompts: Annotated[
        Path,
        typer.Argument(help='JSON lines {"prompt": ..., "class": ...}, or one prompt per line.'),
    ],
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:30000",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 256,
    target: Annotated[
        Path | None, typer.Option(help="With --draft: check the mapping too, for the verdict.")
    ] = None,
    draft: Annotated[Path | None, typer.Option(help="The drafter's folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run prompts through a server: accept length by draft position and class, and whether states look misaligned."""
    from sglang_sm120.foresight import drafter_check, drafter_measure
    from sglang_sm120.foresight.checkpoint import Checkpoint, CheckpointError

    try:
        right = (
            drafter_check.check(Checkpoint(target), Checkpoint(draft)).fits
            if target and draft
            else None
        )
        groups = drafter_measure.measure(
            drafter_measure.server(url), drafter_measure.read_prompts(prompts), max_tokens
        )
    except (CheckpointError, drafter_measure.MeasureError, OSError) as error:
        raise _fail(error) from error
    verdict = drafter_measure.judge(groups[-1], right)
    if as_json:
        body = {"groups": msgspec.to_builtins(groups), "verdict": msgspec.to_builtins(verdict)}
        typer.echo(json.dumps(body))
        return
    wide = max(len(g.positions) for g in groups)
    table = Table(title="Accepted drafts by position (share of verify passes)")
    table.add_column("class")
    for column in ("prompts", "tokens", "accept length", *(str(i + 1) for i in range(wide))):
        table.add_column(column, justify="right")
    for g in groups:
        table.add_row(
            escape(g.group),
            str(g.prompts),
            str(g.tokens),
            f"{g.accept_length:.2f}",
            *(f"{p:.2f}" for p in g.positions),
        )
    console = Console()
    console.print(table)
    console.print(f"[{'bold red' if verdict.misaligned else 'green'}]{escape(verdict.text)}[/]")
