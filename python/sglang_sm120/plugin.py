"""Entry point `sm120` of `sglang.srt.plugins`.

SGLang calls `register` early in every process. It adds the command-line flags and a look at each process's
configuration (`hooks/launch.py`); `hooks/contract.py` lists which file serves which part after that.
"""

from __future__ import annotations

import logging

from sglang_sm120.options import asked_for, plugins_switched_off

logger = logging.getLogger("sglang_sm120")


def register() -> None:
    """Phase 1. Does nothing when `SGLANG_PLUGINS` is set and empty.

    Raises:
        SystemExit: the installed SGLang does not fit and the user asked for the plugin. SGLang only logs an
            ordinary exception of a plugin and would start without it.
    """
    if plugins_switched_off():
        return
    from sglang_sm120.hooks import contract

    try:
        contract.register(contract.load_part("launch"))
    except contract.HookRefused as refused:
        if asked_for():
            raise SystemExit(str(refused)) from None
        logger.warning("%s", refused)
        return
    from sglang_sm120.hooks import launch

    launch.register_checks()
