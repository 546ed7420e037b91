"""Have a running SGLang server profile itself while it answers a few requests."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import httpx

PROMPT = (
    "Write a long and detailed description of how a steam locomotive works, from the firebox to the "
    "driving wheels, and explain each part."
)


class LiveError(RuntimeError):
    """The server could not be profiled; the text says at which step."""


def profile_server(
    url: str, folder: Path, steps: int, concurrency: int, *, timeout_s: float = 180.0
) -> list[Path]:
    """Profile `steps` forward steps of a server under load.

    Args:
        url: base address of the server.
        folder: where the server writes traces; must be visible here under the same path.
        steps: forward steps to record.
        concurrency: requests kept running.
        timeout_s: bound for the whole measurement.

    Returns:
        The trace files of this measurement, one per rank.

    Raises:
        LiveError: the server cannot be reached, refuses, or writes nothing in time.
    """
    target = folder / uuid4().hex[:8]
    target.mkdir(parents=True)
    deadline = time.monotonic() + timeout_s
    with httpx.Client(base_url=url, timeout=timeout_s) as client:
        tokens = 4 * steps + 32
        with ThreadPoolExecutor(concurrency) as pool:
            try:
                _generate(client, 8)
                answers = [pool.submit(_generate, client, tokens) for _ in range(concurrency)]
                # Recording begins when the requests are past their prefill.
                time.sleep(0.5)
                # Python stacks would double the host's time, and with it what ranks wait for each other.
                body = {
                    "output_dir": str(target), "num_steps": steps, "activities": ["CPU", "GPU"],
                    "with_stack": False, "record_shapes": False,
                }  # fmt: skip
                client.post("/start_profile", json=body).raise_for_status()
                while not _complete(target) and time.monotonic() < deadline:
                    if all(answer.done() for answer in answers):
                        answers = [
                            pool.submit(_generate, client, tokens) for _ in range(concurrency)
                        ]
                    time.sleep(0.2)
                for answer in answers:
                    answer.result()
            except httpx.HTTPError as error:
                raise LiveError(f"{url}: {type(error).__name__}: {error}") from None
    files = sorted(target.glob("*.trace.json.gz"))
    if not files:
        raise LiveError(f"the server wrote no trace to {target} within {timeout_s:.0f} s")
    return files


def _generate(client: httpx.Client, tokens: int) -> None:
    body = {
        "text": PROMPT,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    client.post("/generate", json=body).raise_for_status()


def _complete(folder: Path) -> bool:
    """Whether traces are there and have stopped growing."""
    before = {p: p.stat().st_size for p in folder.glob("*.trace.json.gz")}
    if not before:
        return False
    time.sleep(1.0)
    return before == {p: p.stat().st_size for p in folder.glob("*.trace.json.gz")}
