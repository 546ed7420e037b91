"""A plugin for tests: spoils drafts while a file says so, and times passes by a script instead of a clock.

Verification rejects spoiled drafts, so tokens stay what they are. The file changes only while no request runs, so
that every rank sees the change before the same pass. With scripted times a choice depends on nothing but the passes
before it, however loaded the machine is.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

CONTROL = "SM120_TEST_SCRIPT"
# Milliseconds of a pass by draft steps; -1 is a plain step that also leaves draft-extend out.
PASS_MS = {-1: 9.5, 0: 10.0, 1: 11.0, 3: 13.0, 5: 13.2}


class ScriptedEvent:
    """An event of a clock that only `advance` moves."""

    now = 0.0

    def record(self) -> None:
        self.at = ScriptedEvent.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: ScriptedEvent) -> float:
        """Milliseconds from this event to `end_event`."""
        return end_event.at - self.at


def advance(original: Any, policy: Any, batch_size: int) -> int:
    """The policy's answer; the pass that it is for then takes its scripted time."""
    steps = original(policy, batch_size)
    ScriptedEvent.now += PASS_MS[policy.shape[0]]
    return steps


def spoil(original: Any, worker: Any, batch: Any, **kwargs: Any) -> Any:
    verify_input = original(worker, batch, **kwargs)
    if Path(os.environ[CONTROL]).read_text() == "spoil":
        rows = verify_input.draft_token.view(-1, verify_input.draft_token_num)
        # Bytes 1 and 2 never occur in the text that the tiny models know.
        rows[:, 1:] = 1 + rows[:, 1:] % 2
    return verify_input


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang_sm120.hooks import adaptive

    # A test cannot wait for the thousand passes that a careful budget takes to look again.
    adaptive.PolicyConfig = functools.partial(
        adaptive.PolicyConfig, explore=0.25, rewarm=2, settle=8
    )
    adaptive.FIRST_DECISION = 12
    adaptive.WallEvent = ScriptedEvent
    asked = adaptive.ServedPolicy.get_steps_for_batch
    adaptive.ServedPolicy.get_steps_for_batch = lambda policy, batch: advance(asked, policy, batch)
    HookRegistry.register(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft", spoil, HookType.AROUND
    )
