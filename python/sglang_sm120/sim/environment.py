"""What a server on this machine is started with: a free port, and its environment."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


def free_port() -> int:
    """A TCP port nobody listens on, searched from a place that differs between processes.

    The range lies below Linux's ephemeral ports, so that an outgoing connection cannot take it meanwhile.

    Raises:
        OSError: No port of the range is free.
    """
    low, high = 12000, 32000
    start = (os.getpid() * 37) % (high - low)
    for offset in range(0, high - low, 11):
        port = low + (start + offset) % (high - low)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free TCP port in {low}..{high}; stop some of the listening processes")


def server_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of a server: the caller's, offline, on the CPU platform unless told otherwise, with `changes`."""
    env = dict(os.environ)
    if "SGLANG_PLATFORM" not in changes:
        env.setdefault("SGLANG_PLATFORM", "sm120_sim")
    env.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
    )
    if changes.get("SGLANG_PLATFORM", env.get("SGLANG_PLATFORM")) == "sm120_sim":
        # SGLang looks for CUDA before it looks at the platform.
        env["CUDA_VISIBLE_DEVICES"] = ""
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env
