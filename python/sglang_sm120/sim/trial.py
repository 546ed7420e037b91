"""One trial of the demo: a real server, the same prompts, and what its counters say about every verify pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec

from sglang_sm120.sim.models import Built, Case
from sglang_sm120.sim.server import ServerError, SimServer

FUSED_KINDS = ("fused_attention_sum", "fused_ffn_sum")
# Counters are written about twice a second; they must have stood still this long to count as final.
_SETTLE_S = 1.5
_WAIT_S = 30.0


class Outcome(msgspec.Struct, kw_only=True):
    """What one server did with the prompts.

    Attributes:
        name: The trial's title.
        answers: Texts, in the order of the prompts.
        right: Answers equal to the text that the target knows.
        tokens: Tokens generated.
        accept_length: Mean tokens per verify pass; None without speculation.
        forward: Kind of the target's generating pass: "verify" or "decode".
        passes: Generating passes served.
        sums_per_pass: Sums over ranks per generating pass, by kind; the least over the ranks for fused kinds, the
            most for others.
        gloo_total: All-reduces that gloo did in forward passes of any kind, all ranks together.
        start_s: Seconds until the server was ready.
        serve_s: Seconds for all prompts.
    """

    name: str
    answers: list[str]
    right: int
    tokens: int
    accept_length: float | None
    forward: str
    passes: int
    sums_per_pass: dict[str, float]
    gloo_total: int
    start_s: float
    serve_s: float

    @property
    def fused_per_pass(self) -> float:
        """Fused sums per generating pass."""
        return sum(self.sums_per_pass.get(kind, 0.0) for kind in FUSED_KINDS)


def run_trial(
    name: str,
    model: Built,
    cases: Sequence[Case],
    flags: Sequence[str],
    *,
    folder: Path,
    tp: int = 2,
    concurrency: int = 8,
    on_ready: Callable[[], None] = lambda: None,
    on_answer: Callable[[], None] = lambda: None,
) -> Outcome:
    """Start a server, send every prompt through the OpenAI-compatible API, read the counters, stop it.

    Args:
        name: Title, also the name of the log and counter files in `folder`.
        model: What to serve.
        cases: Prompts with the right continuations.
        flags: More server flags.
        folder: Where the log and the counters go.
        tp: Ranks.
        concurrency: Prompts in flight.
        on_ready: Called once the server answers.
        on_answer: Called after each answer.

    Raises:
        ServerError: The server failed, or wrote no counters.
    """
    stats = folder / f"{name}.stats"
    server = SimServer(
        model.target, [*flags, "--sm120-stats", str(stats)], tp=tp, log=folder / f"{name}.log"
    )
    with server:
        on_ready()
        began = time.monotonic()
        answers = _ask(server, cases, concurrency, on_answer)
        serve_s = time.monotonic() - began
        accept = server.accept_length()
        reports = [_final(Path(f"{stats}.rank{rank}"), server) for rank in range(tp)]
        start_s = server.startup_s or 0.0
    forward = "verify" if "verify" in reports[0]["passes"] else "decode"
    return Outcome(
        name=name,
        answers=answers,
        right=sum(answer == case.expected for answer, case in zip(answers, cases)),
        tokens=sum(len(case.expected.encode()) for case in cases),
        accept_length=accept,
        forward=forward,
        passes=reports[0]["passes"].get(forward, 0),
        sums_per_pass=_over_ranks([r["sums_per_pass"].get(forward, {}) for r in reports]),
        gloo_total=sum(
            kinds.get("gloo", 0)
            for report in reports
            for forward_kind, kinds in report["sums"].items()
            if forward_kind != "outside"
        ),
        start_s=start_s,
        serve_s=serve_s,
    )


def _ask(
    server: SimServer, cases: Sequence[Case], concurrency: int, on_answer: Callable[[], None]
) -> list[str]:
    answers = [""] * len(cases)

    def one(number: int) -> None:
        case = cases[number]
        answer = server.complete(case.prompt, max_tokens=len(case.expected.encode()))
        answers[number] = answer["choices"][0]["text"]

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        for done in as_completed([pool.submit(one, number) for number in range(len(cases))]):
            done.result()
            on_answer()
    return answers


def _final(path: Path, server: SimServer) -> dict[str, Any]:
    """A rank's counters once they no longer change.

    Raises:
        ServerError: The file is missing, or the counters do not stand still, half a minute after the last answer.
    """
    last, since, deadline = b"", time.monotonic(), time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        found = path.read_bytes() if path.exists() else b""
        if found != last:
            last, since = found, time.monotonic()
        if last and time.monotonic() - since > _SETTLE_S:
            return msgspec.json.decode(last)
        time.sleep(0.2)
    raise ServerError(
        f"the server's counters in {path} {'keep changing' if last else 'were not written'}; "
        f"is the plugin installed?\n{server.tail()}"
    )


def _over_ranks(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    kinds = {kind for report in reports for kind in report}
    return {
        kind: (min if kind in FUSED_KINDS else max)(report.get(kind, 0.0) for report in reports)
        for kind in sorted(kinds)
    }
