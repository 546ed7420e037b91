"""Name a dead rank before the error that its death caused anywhere else, in gloo or NCCL, ends the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_sm120.hooks import session as sessions
from sglang_sm120.hooks.contract import Binding, Part, Target


def explain_failure(original: Callable[..., Any], self: Any) -> Any:
    """Around `Scheduler.run_event_loop`: any error ends this rank; say first which other rank is gone."""
    try:
        return original(self)
    except Exception:
        sessions.current().explain()
        raise


PART = Part(
    "failures",
    (
        Binding(
            Target(
                "sglang.srt.managers.scheduler.Scheduler.run_event_loop",
                "(self)",
                "names a dead rank when an error ends this one",
            ),
            HookType.AROUND,
            explain_failure,
        ),
    ),
)
