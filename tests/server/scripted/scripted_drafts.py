"""A plugin for tests: spoils drafts while a file says so, so that acceptance follows a script.

Verification rejects spoiled drafts, so tokens stay what they are. The file changes only while no request runs, so
that every rank sees the change before the same pass.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

CONTROL = "SM120_TEST_SCRIPT"


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
    HookRegistry.register(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft", spoil, HookType.AROUND
    )
