"""One server under measurement: start a launch line, stream completions from its OpenAI endpoint, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx


class ServerFailed(RuntimeError):
    """The launch line did not come up, or the server stopped answering; the text has the end of its log."""


@dataclass(frozen=True)
class Row:
    """One setting on one class of prompts.

    Attributes:
        tokens_per_s: all requests together, from each one's first token to its last.
        accept_length: tokens per pass and request; 1.0 without speculation.
        pass_ms: time between a request's passes.
    """

    setting: str
    prompts: str
    tokens_per_s: float
    accept_length: float
    pass_ms: float
    texts: tuple[str, ...] = ()


@contextlib.contextmanager
def serving(line: Sequence[str], port: int, env: dict[str, str], timeout_s: float) -> Iterator[str]:
    """Start a launch line, wait until it answers, and end it and its children afterwards.

    Raises:
        ServerFailed: it ended, or did not answer in time.
    """
    with tempfile.NamedTemporaryFile("wb", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            [*line, "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=30.0).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                tail = Path(log.name).read_text(errors="replace")[-3000:]
                raise ServerFailed(f"the server did not start: {shlex.join(line)}\n{tail}")
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class Answer:
    """What one streamed completion showed."""

    text: str
    tokens: int
    passes: int
    first_s: float
    last_s: float


def complete(url: str, prompt: str, tokens: int) -> Answer:
    """One greedy completion over the OpenAI endpoint, streamed for the time of its first token."""
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_spec_tokens_details": True,
    }
    text, first, last, used, passes = [], 0.0, 0.0, 0, 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=1200.0) as stream:
        stream.raise_for_status()
        for raw in stream.iter_lines():
            if not raw.startswith("data: ") or raw == "data: [DONE]":
                continue
            event = json.loads(raw[6:])
            if event.get("usage"):
                used = event["usage"]["completion_tokens"]
            details = (event.get("sglext") or {}).get("spec_tokens_details")
            if details:
                details = details[0] if isinstance(details, list) else details
                passes = details["spec_verify_ct"]
            for choice in event.get("choices") or []:
                if choice.get("text"):
                    last = time.perf_counter()
                    first = first or last
                    text.append(choice["text"])
    if not used or not first:
        raise ServerFailed(
            f"{url} streamed no tokens or no usage for a prompt of {len(prompt)} characters"
        )
    return Answer("".join(text), used, passes or used - 1, first, last)


def measure(
    url: str,
    setting: str,
    kind: str,
    prompts: Sequence[str],
    tokens: int,
    concurrency: int,
    rounds: int,
) -> Row:
    """Send the prompts of one class `rounds` times, `concurrency` at a time."""
    complete(url, prompts[0], 8)
    work = list(prompts) * rounds
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda p: complete(url, p, tokens), work))
    # The first token comes from the prefill: what follows it is what the passes made.
    spans = [a.last_s - a.first_s for a in answers]
    made = sum(a.tokens - 1 for a in answers)
    busy = max(a.last_s for a in answers) - min(a.first_s for a in answers)
    rate = made / busy if concurrency > 1 else made / sum(spans)
    return Row(
        setting,
        kind,
        rate,
        made / sum(a.passes for a in answers),
        1e3 * sum(spans) / sum(a.passes for a in answers),
        tuple(a.text for a in answers[: len(prompts)]),
    )
