"""`python -m sglang_sm120.hooks.report`: every hook target, the signature it expects, and what is installed.

Exit status 1 when a target does not fit.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from sglang_sm120.hooks import contract

_STYLE = {"ready": "green", "hooked": "cyan", "seam": "green", "changed": "red", "missing": "red"}


def table(found: list[contract.Finding]) -> Table:
    """The findings as a table, one row per target."""
    out = Table(
        title=f"Hook targets in SGLang {contract.sglang_version()} (written for {contract.KNOWN_RELEASES})",
        show_lines=True,
    )
    for column in ("part", "target", "what for", "state"):
        out.add_column(column, overflow="fold")
    for f in found:
        where = f"{f.target.path}\n{f.target.signature}"
        state = f"[{_STYLE[f.state]}]{f.state}[/]"
        if f.state == "seam":
            state += f"\nnot patched: SGLang has {f.detail}"
        elif not f.fits:
            state += f"\n{f.found or f.detail}"
        out.add_row(f.part, where, f.target.why, state)
    return out


def main() -> int:
    """Print the table; 0 when every target fits, else 1 with the sentence a server would refuse with."""
    console = Console()
    try:
        found = contract.findings()
    except contract.HookRefused as refused:
        console.print(str(refused), style="red")
        return 1
    console.print(table(found))
    sentence = contract.refusal(found)
    if sentence:
        console.print(sentence, style="red", soft_wrap=True)
    return 1 if sentence else 0


if __name__ == "__main__":
    sys.exit(main())
