"""`sglang-sm120 plan`: what a model costs on a machine, and what each part of the plugin would give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from sglang_sm120.foresight.deployment import Outcome, Planner, Setting
    from sglang_sm120.foresight.memory import Memory


def command(
    machine: Annotated[
        str, typer.Argument(help="A machine's TOML, a folder saved by `doctor`, or a ready name.")
    ],
    model: Annotated[
        str, typer.Argument(help="A ready model (see --help's end) or a config.json.")
    ],
    tp: Annotated[int, typer.Option(min=0, help="Tensor-parallel ranks; 0: all GPUs.")] = 0,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks (divides --tp).")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 1,
    draft_tokens: Annotated[
        int,
        typer.Option(min=0, help="Drafts per pass; a verify pass has one row more per sequence."),
    ] = 3,
    context: Annotated[int, typer.Option(min=1, help="Tokens in each sequence's cache.")] = 4096,
    accept: Annotated[
        str,
        typer.Option(help="Share of passes in which the first 1, 2, ... drafts are right."),
    ] = "0.633,0.404,0.264",
    all_reduce_us: Annotated[
        str, typer.Option(help="Measured sums on this machine, ROWS=US,..., e.g. 4=205.")
    ] = "",
    stock_nccl: Annotated[
        bool,
        typer.Option(
            "--stock-nccl", help="NCCL as it comes on AMD hosts: protocol Simple throughout."
        ),
    ] = False,
    compute_ms: Annotated[
        str, typer.Option(help="Measured passes without communication, ROWS=MS,..., e.g. 4=5.")
    ] = "",
    weights: Annotated[
        str, typer.Option(help="Weight formats, e.g. experts=nvfp4,attention=fp8.")
    ] = "",
    drafter: Annotated[
        str, typer.Option(help="eagle3 (small dense head) or mtp (one more layer of the model).")
    ] = "eagle3",
    efficiency: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="Share of memory bandwidth that weights reach.")
    ] = 1.0,
    cache: Annotated[str, typer.Option(help="Cache elements: bf16 or fp8.")] = "bf16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan a deployment: passes, verification in plain steps, break-even accept length, best draft length, memory.

    Ready models: kimi-k2.5, deepseek-v3, deepseek-v4-flash, deepseek-v4-pro, glm-5, qwen3.5-397b, minimax-m2.5.

    Example (the case the project was born from): sglang-sm120 plan dual-socket-direct kimi-k2.5 --all-reduce-us 4=205
    """
    from sglang_sm120.fabric import simulate, simulate_machine
    from sglang_sm120.foresight import compute, shapes, speculation, sums
    from sglang_sm120.foresight.deployment import Planner, Setting
    from sglang_sm120.foresight.memory import memory

    try:
        box = simulate_machine.read(machine)
        world = tp or box.world
        if world > box.world:
            raise ValueError(f"--tp {world}: {box.name} has {box.world} GPUs")
        if cache not in ("bf16", "fp8"):
            raise ValueError(f"--cache {cache}: bf16 or fp8")
        if drafter not in ("eagle3", "mtp"):
            raise ValueError(f"--drafter {drafter}: eagle3 or mtp")
        formats = dict(part.split("=", 1) for part in weights.split(",")) if weights else {}
        acceptance = tuple(float(a) for a in accept.split(","))
        speculation.check(acceptance)
        setting = Setting(
            machine=box,
            ranks=tuple(range(world)),
            model=shapes.read(model, formats),
            roof=compute.Roof(
                card=compute.card_named(box.gpus[0].name),
                world=world,
                expert_ways=ep,
                efficiency=efficiency,
                cache_bytes=2.0 if cache == "bf16" else 1.0,
            ),
            sequences=batch,
            drafts=draft_tokens,
            context=context,
            acceptance=acceptance,
            drafter="mtp" if drafter == "mtp" else "eagle3",
            stock=stock_nccl,
            points=sums.parse_points(all_reduce_us) if all_reduce_us else {},
            compute_ms=sums.parse_points(compute_ms) if compute_ms else {},
        )
        planner = Planner(setting)
        outcomes = planner.outcomes()
        without, within = memory(setting, plugin=False), memory(setting)
    except (ValueError, OSError, simulate.SimulationError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(_json(setting, outcomes, without, within))
        return
    console = Console()
    _head(console, setting, planner, outcomes[0])
    console.print(_parts(outcomes))
    _memory(console, setting, without, within)


def _head(console: Console, setting: Setting, planner: Planner, now: Outcome) -> None:
    model, roof = setting.model, setting.roof
    console.print(
        f"[bold]{escape(model.name)}[/] on {escape(setting.machine.title)}, TP {roof.world}, "
        f"{setting.sequences} sequence(s) of {setting.context} tokens, {setting.drafts} drafts"
    )
    console.print(f"shapes: {escape(model.source)}")
    source = "measured" if setting.points else "simulated"
    floor = "measured" if setting.compute_ms else "roofline"
    console.print(
        f"{model.layer_sums} all-reduces per pass, {model.fusable_sums} of them followed by residual + RMSNorm. "
        f"A verify pass of {setting.rows} rows: {now.sums_ms:.1f} of {now.verify_ms:.1f} ms in all-reduces "
        f"({now.sum_us:.0f} us each, {source}), {now.compute_ms:.1f} ms compute ({floor})."
    )
    worth = "pays" if now.pays else "loses"
    console.print(
        f"One speculative pass costs {now.plain_steps:.2f} plain steps: that is the accept length it needs. At accept "
        f"length 2.0 speculation {'loses' if planner.loses_at(2.0) else 'pays'}; with the acceptance given "
        f"({now.accept_length:.2f}) it {worth}: {now.plain_tps:.0f} tok/s plain, {now.tps:.0f} speculative."
    )


def _parts(outcomes: list[Outcome]) -> Table:
    table = Table(title="What each part gives (simulated unless measured values were given)")
    table.add_column("configuration")
    table.add_column("sums by")
    for column in (
        "us per sum",
        "plain ms",
        "verify ms",
        "draft ms",
        "break-even",
        "plain tok/s",
        "drafts",
        "tok/s",
        "best drafts",
    ):
        table.add_column(column, justify="right")
    for o in outcomes:
        colour = "green" if o.pays or not o.drafts else "red"
        table.add_row(
            o.name,
            o.schedule,
            f"{o.sum_us:.1f}",
            f"{o.plain_ms:.1f}",
            f"{o.verify_ms:.1f}",
            f"{o.draft_ms:.1f}",
            f"{o.plain_steps:.2f}",
            f"{o.plain_tps:.0f}",
            str(o.drafts),
            f"[{colour}]{o.tps:.0f}[/]",
            str(o.best_drafts),
        )
    return table


def _memory(console: Console, setting: Setting, without: Memory, within: Memory) -> None:
    console.print(
        f"Memory per GPU: weights {within.weights_gib:.1f} GiB of {within.card_gib:.1f}; NCCL {without.nccl_mib:.0f} MiB "
        f"with its defaults, {within.nccl_compact_mib:.0f} MiB compact; slabs {within.slabs_mib:.0f} MiB "
        f"(up to {within.capacity_rows} rows); cache {within.cache_kib:.1f} KiB per token: {within.tokens:,} tokens fit "
        f"with the plugin, {without.tokens:,} without."
    )
    if not within.fits:
        console.print(
            "[bold red]The weights do not fit:[/] more GPUs, or narrower weights (--weights experts=nvfp4)."
        )


def _json(setting: Setting, outcomes: list[Outcome], without: Memory, within: Memory) -> str:
    body = {
        "model": setting.model.name,
        "source": setting.model.source,
        "machine": setting.machine.name,
        "world": setting.roof.world,
        "rows": setting.rows,
        "layer_sums": setting.model.layer_sums,
        "fusable_sums": setting.model.fusable_sums,
        "configurations": outcomes,
        "memory": {"with_plugin": within, "without": without},
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=1).decode()
