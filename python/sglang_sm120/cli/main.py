"""`sglang-sm120`: each command lives in a file of this folder and is imported only when it is asked for."""

from __future__ import annotations

import importlib
import sys

import typer

# command -> (module, help). A module defines `app` (typer.Typer) or `command` (a function).
COMMANDS: dict[str, tuple[str, str]] = {
    "simulate": ("simulate", "Latency of collectives on a described PCIe machine, simulated."),
    "demo": ("demo", "Serve a tiny model three times on this CPU and compare every token and sum."),
    "drafter": ("drafter", "Check, remap or measure an EAGLE-3 drafter."),
    "doctor": (
        "doctor",
        "Show the PCIe tree and what is wrong with this machine, with the line that fixes it.",
    ),
    "probe": ("probe", "Measure the edges between GPUs: latency, bandwidth, collapse, integrity."),
    "schedule": ("schedule", "Print who sends what to whom in each hop, and where the bytes go."),
    "choices": (
        "choices",
        "Show which backend and schedule serve which rows: the plan of a server.",
    ),
    "plan": (
        "plan",
        "What a model costs on a machine, and what each part of the plugin would give.",
    ),
    "verify-profile": (
        "verify_profile",
        "Where the time of a verify pass goes, from a profiler trace.",
    ),
    "hooks": ("hooks", "Check the installed SGLang against every function that the plugin wraps."),
}


def _load(name: str, help_text: str, module: str, root: typer.Typer) -> None:
    loaded = importlib.import_module(f"sglang_sm120.cli.{module}")
    if hasattr(loaded, "app"):
        root.add_typer(loaded.app, name=name, help=help_text)
    else:
        root.command(name, help=help_text)(loaded.command)


def build(argv: list[str]) -> typer.Typer:
    """Build the command tree; only the asked-for command's module is imported unless help is wanted."""
    root = typer.Typer(
        name="sglang-sm120",
        help="Tools around the SGLang plugin for GPUs that talk over PCIe only.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
    )
    # A callback keeps a single-command tree a tree, so that the command's name stays part of the line.
    root.callback()(lambda: None)
    wanted = next((a for a in argv if not a.startswith("-")), None)
    for name, (module, help_text) in COMMANDS.items():
        if wanted is None or wanted == name or wanted not in COMMANDS:
            _load(name, help_text, module, root)
    return root


def main() -> None:
    build(sys.argv[1:])(prog_name="sglang-sm120")


if __name__ == "__main__":
    main()
