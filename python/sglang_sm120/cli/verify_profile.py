"""`sglang-sm120 verify-profile`: where the time of a verify pass goes, and what could be saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from sglang_sm120.comm.plan import Plan
from sglang_sm120.verify.live import LiveError, profile_server
from sglang_sm120.verify.profile import Profile, analyse
from sglang_sm120.verify.profile_report import as_data, draw_pass, print_profile, print_savings
from sglang_sm120.verify.savings import Saving, economy, savings
from sglang_sm120.verify.trace import RankTrace, TraceError, rank_of, read_trace

# The pass people ask about first; the others are what a trace without speculation has.
PREFERRED = ("VERIFY", "DECODE", "GRAPH", "RUN")


def command(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Trace files of one server (one per rank), or the folder they are in."),
    ] = None,
    url: Annotated[
        str,
        typer.Option(
            help="Profile this running SGLang server instead, e.g. http://localhost:30000."
        ),
    ] = "",
    folder: Annotated[
        Path,
        typer.Option(help="Where the running server writes its traces; both must see this folder."),
    ] = Path("/tmp/sm120-profile"),
    steps: Annotated[int, typer.Option(help="Forward steps to profile on a running server.")] = 40,
    concurrency: Annotated[int, typer.Option(help="Requests at once on a running server.")] = 1,
    layers: Annotated[
        int | None, typer.Option(help="Decoder layers; by default half the all-reduces of a pass.")
    ] = None,
    rows: Annotated[
        int, typer.Option(help="Rows per verify pass (requests x draft tokens), for message sizes.")
    ] = 0,
    hidden: Annotated[int, typer.Option(help="Hidden size of the model, for message sizes.")] = 0,
    accept_length: Annotated[
        float | None, typer.Option(help="Tokens per verify pass, to judge whether drafting pays.")
    ] = None,
    plain_ms: Annotated[
        float | None, typer.Option(help="Length of a plain decode pass when the trace has none.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="This machine's plan as JSON, for measured times of our kernels."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw one pass into this file.")] = None,
    output: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Read torch-profiler traces (SGLang's /start_profile), or measure a running server."""
    console = Console()
    try:
        files = profile_server(url, folder, steps, concurrency) if url else _files(traces or [])
        found = [read_trace(path, rank=rank_of(path, i)) for i, path in enumerate(files)]
        profile = analyse(found, layers)
        known_plan = msgspec.json.decode(plan.read_bytes(), type=Plan) if plan else None
    except (TraceError, LiveError, OSError, msgspec.DecodeError) as error:
        raise SystemExit(f"verify-profile: {error}") from None
    print_profile(profile, console)
    kind = next((k for k in PREFERRED if k in profile.main), next(iter(profile.main)))
    report = profile.main[kind]
    saved: list[Saving] = savings(
        report,
        rows=rows or max(1, report.typical.batch),
        hidden=hidden if rows else 0,
        plan=known_plan,
        economy_of=economy(profile, accept_length, plain_ms),
    )
    print_savings(saved, report.mean("span"), console)
    if picture:
        _draw(found, profile, kind, picture, url)
        console.print(f"picture: {picture}")
    if output:
        output.write_text(json.dumps(as_data(profile, saved), indent=1))


def _files(given: list[Path]) -> list[Path]:
    files: list[Path] = []
    for path in given:
        if path.is_dir():
            files += sorted([*path.glob("*.trace.json.gz"), *path.glob("*.trace.json")])
        else:
            files.append(path)
    if not files:
        raise TraceError("give trace files, a folder with *.trace.json.gz, or --url")
    return files


def _draw(found: list[RankTrace], profile: Profile, kind: str, picture: Path, url: str) -> None:
    rank = min(profile.ranks)
    typical = profile.main[kind].typical
    trace = next(t for t in found if t.rank == rank)
    item = next(
        p
        for p in trace.passes
        if p.kind == kind and abs((p.end - p.start) - typical.split.span) < 1e-6
    )
    source = url or "recorded trace"
    draw_pass(item, picture, title=f"One {kind} pass of rank {rank}, {source}")
