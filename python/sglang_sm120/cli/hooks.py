"""`sglang-sm120 hooks`: whether the installed SGLang has every function that the plugin wraps."""

from __future__ import annotations

import typer


def command() -> None:
    """List every hook target, the signature it was written for, and what is installed; exit 1 if one differs."""
    from sglang_sm120.hooks import report

    raise typer.Exit(report.main())
