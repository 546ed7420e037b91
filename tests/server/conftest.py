"""Real SGLang servers on this machine's CPU, each started once per session and asked the same prompts.

Rig: CPU server, simulated platform `sm120_sim`, TP 2, tiny trained models. Times say nothing about GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sglang_sm120.sim import models
from sglang_sm120.sim.models import Built, Case, Family
from sglang_sm120.sim.server import ServerError, SimServer, eagle3_flags

PROMPTS, NEW_TOKENS = 6, 40


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    installed = any(e.name == "sm120" for e in entry_points(group="sglang.srt.plugins"))
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.server)
            if not installed:
                item.add_marker(
                    pytest.mark.skip(reason="sglang-sm120 is not installed; run `make build`")
                )


@dataclass(frozen=True)
class Way:
    """How one server is started."""

    family: Family
    eagle: bool
    fused: bool

    def __str__(self) -> str:
        return f"{self.family}-{'eagle3' if self.eagle else 'plain'}-{'fused' if self.fused else 'stock'}"


@dataclass
class Death:
    """How a server ended after one of its ranks was killed while it served.

    Attributes:
        seconds: from the kill until the launcher had ended.
        log: everything the server printed.
        left: processes of the server that were still there.
    """

    seconds: float
    log: str
    left: list[int]


@dataclass
class Served:
    """What one server answered.

    Attributes:
        one_by_one, together: token ids of each prompt, sent alone and all at once.
        accept_lengths: tokens per verify pass of each prompt sent alone; None without speculation.
        reports: counters of each rank, as `--sm120-stats` wrote them.
        metrics: what `/metrics` said after the last answer; empty where it was off.
        death: how the server ended when a rank was killed; None where none was.
    """

    way: Way
    model: Built
    one_by_one: list[tuple[int, ...]]
    together: list[tuple[int, ...]]
    accept_lengths: list[float | None]
    reports: list[dict[str, Any]]
    log: str
    metrics: str = ""
    death: Death | None = None


class SglangServe(SimServer):
    """The same server, started with `sglang serve` instead of `python -m sglang.launch_server`."""

    @property
    def command(self) -> list[str]:
        line = super().command
        start = line.index("--model-path")
        return [str(Path(sys.executable).with_name("sglang")), "serve", *line[start:]]


@pytest.fixture(scope="session")
def built() -> Callable[[Family], Built]:
    """Models of a family, trained at first use and kept in the user's cache."""
    done: dict[str, Built] = {}

    def of(family: Family) -> Built:
        if family not in done:
            done[family] = models.build(family)
        return done[family]

    return of


def cases_of(model: Built) -> list[Case]:
    return model.cases(PROMPTS, new=NEW_TOKENS)


# The server whose /metrics are read, and the one that loses a rank at its end.
MEASURED = Way("deepseek", eagle=True, fused=True)
KILLED = Way("llama", eagle=True, fused=True)


def flags_of(way: Way, model: Built, stats: Path) -> list[str]:
    flags = ["--sm120-stats", str(stats)]
    if way.eagle:
        flags += eagle3_flags(model.drafter)
    if way.fused:
        # Pinned, so that what is fused does not rest on times measured on a busy machine; see test_plan_server.py for those.
        flags += ["--enable-sm120-fusion", "--sm120-backend", "host", "--sm120-plan-cache", "off"]
    if way == MEASURED:
        flags += ["--enable-metrics"]
    return flags


def settled_reports(stats: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """The ranks' counters, once they have stood still for longer than the interval between two writes."""
    paths = [Path(f"{stats}.rank{rank}") for rank in range(ranks)]
    before: list[bytes] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        now = [path.read_bytes() if path.exists() else b"" for path in paths]
        if now == before and all(now):
            return [json.loads(text) for text in now]
        before = now
        time.sleep(1.2)
    raise ServerError(f"the counters in {stats}.rank* were not written or never stand still")


def ask(server: SimServer, way: Way, model: Built, stats: Path) -> Served:
    prompts = [case.prompt for case in cases_of(model)]
    alone = server.generate(prompts, max_new_tokens=NEW_TOKENS)
    together = server.generate(prompts, max_new_tokens=NEW_TOKENS, concurrency=PROMPTS)
    return Served(
        way,
        model,
        [answer.output_ids for answer in alone],
        [answer.output_ids for answer in together],
        [answer.accept_length for answer in alone],
        settled_reports(stats),
        server.log_text(),
        httpx.get(f"{server.url}/metrics/", timeout=30).text if way == MEASURED else "",
    )


def kill_a_rank(server: SimServer, model: Built) -> Death:
    """Kill rank 1 while the server is busy, and see how it ends."""
    prompt = cases_of(model)[0].prompt

    def keep_busy() -> None:
        with contextlib.suppress(ServerError):  # raised when the server has ended, as it must
            while True:
                server.generate([prompt], max_new_tokens=200)

    victim, family = server.scheduler(1), server.children()
    client = threading.Thread(target=keep_busy, daemon=True)
    client.start()
    time.sleep(1.0)
    killed = time.monotonic()
    victim.kill()
    server.wait_exit(60)
    seconds = time.monotonic() - killed
    client.join(30)
    _, alive = psutil.wait_procs(family, timeout=5)
    left = [p.pid for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    return Death(seconds, server.log_text(), left)


ENGINE = """
import json, sys
if __name__ == "__main__":
    import sglang
    from sglang_sm120 import options
    arguments, prompts, new_tokens, settings, out = json.loads(sys.argv[1])
    options.enable(**settings)
    engine = sglang.Engine(**arguments)
    sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
    alone = [engine.generate(p, sampling) for p in prompts]
    together = engine.generate(prompts, sampling)
    import time
    time.sleep(2.5)
    json.dump([[a["output_ids"] for a in alone], [a["output_ids"] for a in together]], open(out, "w"))
    engine.shutdown()
"""


def run_engine(way: Way, model: Built, folder: Path, stats: Path) -> Served:
    """The same prompts through `sglang.Engine`, in a process of its own; options come from the environment."""
    arguments: dict[str, Any] = {
        "model_path": str(model.target),
        "tp_size": 2,
        "device": "cpu",
        "mem_fraction_static": 0.1,
        "max_total_tokens": 8192,
        "max_running_requests": 16,
        "grammar_backend": "none",
        "log_level": "info",
    }
    script, out = folder / "engine.py", folder / "answers.json"
    script.write_text(ENGINE)
    prompts = [case.prompt for case in cases_of(model)]
    settings = {"stats": str(stats), "backend": "host", "plan_cache": "off"}
    call = [arguments, prompts, NEW_TOKENS, settings, str(out)]
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(call)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "SGLANG_PLATFORM": "sm120_sim", "HF_HUB_OFFLINE": "1"},
    )
    log = done.stdout + done.stderr
    assert out.exists(), f"the engine gave no answers (status {done.returncode}):\n{log[-4000:]}"
    alone, together = json.loads(out.read_text())
    return Served(
        way,
        model,
        [tuple(ids) for ids in alone],
        [tuple(ids) for ids in together],
        [None] * len(alone),
        settled_reports(stats),
        log,
    )


@pytest.fixture(scope="session")
def served(
    built: Callable[[Family], Built], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Way], Served]:
    """What the server of a way answered; started at first use, stopped before the next one starts."""
    done: dict[Way, Served] = {}

    def of(way: Way) -> Served:
        if way not in done:
            model = built(way.family)
            folder = tmp_path_factory.mktemp(str(way))
            stats = folder / "stats"
            if way == Way("llama", eagle=False, fused=True):
                done[way] = run_engine(way, model, folder, stats)
            else:
                kind = SglangServe if way == Way("deepseek", False, True) else SimServer
                flags = flags_of(way, model, stats)
                with kind(model.target, flags, log=folder / "server.log") as server:
                    done[way] = ask(server, way, model, stats)
                    if way == KILLED:
                        done[way].death = kill_a_rank(server, model)
        return done[way]

    return of


def known_text(model: Built) -> Sequence[str]:
    return [case.expected for case in cases_of(model)]
