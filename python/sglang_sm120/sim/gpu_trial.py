"""One server of the shared-GPU demo: speed, tokens, and where a verify pass spends its time, by SGLang's own profiler."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from sglang_sm120.sim import proxy, shared_gpu, tokenizer
from sglang_sm120.sim.host_use import HostUse, HostWatch
from sglang_sm120.sim.models import Built
from sglang_sm120.sim.server import ServerError, SimServer, eagle3_flags
from sglang_sm120.verify.live import LiveError, profile_server
from sglang_sm120.verify.profile import KindReport, analyse
from sglang_sm120.verify.trace import TraceError, rank_of, read_trace

PROFILED_STEPS = 12
ROUNDS = 3
DEATH_S = 40.0


@dataclass(frozen=True)
class Setup:
    """One way to serve: a name for files, a title for the table, and what it adds to the launch."""

    name: str
    title: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    speculates: bool = True
    ours: bool = False
    adaptive: bool = False


NCCL_ONLY = ("--disable-custom-all-reduce",)
FUSION = ("--enable-sm120-fusion", "--sm120-plan-cache", "off")
DRAFT_STEPS = (0, 1, 3, 5)  # candidates of adaptive lengths
# Words of the log lines that say what adaptive lengths did.
DRAFTING = ("draft lengths", "timed passes at batch", "passes")


def setups(flashinfer: str = "") -> dict[str, Setup]:
    """The servers that can be compared, by name.

    Args:
        flashinfer: folder with FlashInfer to import in the `pcie_ipc` server; empty if it is installed.
    """
    ipc: dict[str, str | None] = {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}
    if flashinfer:
        # Only its all-reduce is wanted: without this SGLang would also take its attention and sampling kernels.
        ipc |= {"SGLANG_IS_FLASHINFER_AVAILABLE": "false", "PYTHONPATH": python_path(flashinfer)}
    keep = ("--sm120-nccl", "keep", "--sm120-verify", "off")
    known = (
        Setup("plain", "plain", NCCL_ONLY, speculates=False),
        Setup("eagle3", "EAGLE-3, NCCL", NCCL_ONLY),
        Setup("pcie_ipc", "EAGLE-3, pcie_ipc", NCCL_ONLY, ipc),
        Setup("kernels", "EAGLE-3, our kernels alone", (*FUSION, *keep), ours=True),
        Setup("compact", "EAGLE-3, compact NCCL alone", (*FUSION, "--sm120-backend", "nccl", "--sm120-verify", "off")),
        Setup("plugin", "EAGLE-3, plugin", FUSION, ours=True),
        Setup("adaptive", "EAGLE-3, plugin, adaptive lengths", FUSION, ours=True, adaptive=True),
    )  # fmt: skip
    return {setup.name: setup for setup in known}


def python_path(folder: str) -> str:
    """PYTHONPATH with one more folder at its end."""
    return ":".join(filter(None, [os.environ.get("PYTHONPATH", ""), folder]))


class Passes(msgspec.Struct, frozen=True, kw_only=True):
    """Verify passes of rank 0 in the profiler's trace; times are means in milliseconds.

    Attributes:
        span: from the first kernel's start to the last one's end.
        communication: kernels that move data between ranks; a fused one contains its norm.
        transfer: of the all-reduces, what no rank spent waiting for another; None when ranks' traces do not match.
        norms: RMSNorm kernels of their own that directly follow a sum.
        all_reduces: per pass.
        by: library -> (all-reduces per pass, mean microseconds).
    """

    span: float
    communication: float
    transfer: float | None
    norms: float
    idle: float
    all_reduces: int
    by: dict[str, tuple[int, float]]


class GpuOutcome(msgspec.Struct, kw_only=True):
    """What one server did.

    Attributes:
        right: answers equal to the known continuation, of `asked`.
        tokens_per_s: one request at a time, median of the rounds.
        pass_ms: time of serving per verify pass, the host's part included; None without speculation.
        calls: calls of our communicators on rank 0, by group and operation.
        metrics: the plugin's lines of /metrics.
        host: what the host did while the rounds were timed.
    """

    name: str
    title: str
    start_s: float
    asked: int
    right: int
    answers: list[list[int]]
    tokens_per_s: float
    accept_length: float | None
    pass_ms: float | None
    passes: Passes | None
    calls: dict[str, dict[str, int]]
    metrics: list[str]
    plan: list[str]
    death: str = ""
    remarks: list[str] = []
    host: HostUse | None = None


def questions(built: Built, count: int, new: int) -> list[tuple[list[int], list[int]]]:
    """Prompts as token ids, with the continuation that the model knows."""
    if built.text:
        cases = built.cases(count, new=new)
        return [(tokenizer.encode(c.prompt), tokenizer.encode(c.expected)) for c in cases]
    walks = [[proxy.successor(start * 17 % 256, n) for n in range(48 + new)] for start in range(count)]  # fmt: skip
    return [(walk[:48], walk[48:]) for walk in walks]


class GpuTrial:
    """A server of one setup: `start`, `measure`, at the end perhaps `kill_a_rank`, and `stop`.

    One is stopped before the next is started: imports of a server beside it made ranks of the measured one wait for
    each other's host, 5 ms per pass.
    """

    def __init__(self, setup: Setup, built: Built, ranks: int, folder: Path, turn: int = 1) -> None:
        self.setup, self.built, self.ranks, self.folder = setup, built, ranks, folder
        self._files = setup.name if turn == 1 else f"{setup.name}-{turn}"
        self._stats = folder / f"{self._files}.stats"
        flags = [
            *shared_gpu.FLAGS, *setup.flags, *(eagle3_flags(built.drafter) if setup.speculates else []),
            "--enable-metrics", "--sm120-stats", str(self._stats),
        ]  # fmt: skip
        if setup.adaptive:
            config = folder / "adaptive.json"
            config.write_text(json.dumps({"1": {"candidate_steps": DRAFT_STEPS}}))
            flags += ["--speculative-adaptive", "--speculative-adaptive-config", str(config)]
        env: dict[str, str | None] = {**shared_gpu.ENVIRONMENT, **setup.env}
        self.server = SimServer(
            built.target, flags, tp=ranks, env=env, log=folder / f"{self._files}.log", start_timeout_s=240.0
        )  # fmt: skip

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ServerError: it ended, or was not ready in time.
        """
        self.server.start()

    def measure(self, count: int, new: int, *, profile: bool) -> GpuOutcome:
        """Ask, time and profile a server that is ready.

        Args:
            count: prompts.
            new: tokens per answer.
            profile: whether to have it profile some verify passes.

        Raises:
            ServerError: it answers with an error or is dead.
        """
        server, asked = self.server, questions(self.built, count, new)
        prompts = [prompt for prompt, _ in asked]
        server.generate(prompts[:2], max_new_tokens=16)  # compiles what is compiled at first use
        rates, per_pass, answers = [], [], []
        watch = HostWatch([server.scheduler(rank) for rank in range(self.ranks)])
        for _ in range(ROUNDS):
            began = time.monotonic()
            answers = server.generate(prompts, max_new_tokens=new)
            taken = time.monotonic() - began
            rates.append(count * new / taken)
            passes = sum(a.verify_passes for a in answers)
            per_pass.append(taken * 1e3 / passes if passes else 0.0)
        host = watch.use()
        lengths = [a.accept_length for a in answers if a.accept_length is not None]
        outcome = GpuOutcome(
            name=self.setup.name,
            title=self.setup.title,
            start_s=server.startup_s or 0.0,
            asked=count,
            right=sum(list(a.output_ids) == right for a, (_, right) in zip(answers, asked)),
            answers=[list(a.output_ids) for a in answers],
            tokens_per_s=statistics.median(rates),
            accept_length=statistics.fmean(lengths) if lengths else None,
            pass_ms=statistics.median(per_pass) if lengths else None,
            passes=None,
            calls=self._calls(),
            metrics=self._metrics(),
            plan=[line for line in server.log_text().splitlines() if "SM120 plan" in line],
            host=host,
        )
        if self.setup.adaptive:
            outcome.remarks += self._drafting()
        if profile:
            try:
                outcome.passes, slow = self._profile()
                outcome.remarks += slow
            except (LiveError, TraceError) as error:
                outcome.remarks.append(f"no profile: {error}")
        return outcome

    def kill_a_rank(self) -> str:
        """Kill the last rank; the log line with which the server ends, or what it did instead."""
        victim = self.server.scheduler(self.ranks - 1)
        victim.kill()
        with contextlib.suppress(ServerError):
            self.server.wait_exit(DEATH_S)
            said = [line for line in self.server.log_text().splitlines() if f"rank {self.ranks - 1}" in line]  # fmt: skip
            return next((line for line in said if "sglang-sm120" in line), "the server ended without our sentence")  # fmt: skip
        return f"the server still ran {DEATH_S:.0f} s after rank {self.ranks - 1} was killed"

    def stop(self) -> None:
        self.server.stop()

    def _profile(self) -> tuple[Passes, list[str]]:
        """Verify passes in SGLang's profiler, and a sentence about each rank whose processor was slow."""
        folder = self.folder / f"{self._files}.traces"
        files = profile_server(self.server.url, folder, PROFILED_STEPS, 1, timeout_s=90.0)
        traces = [read_trace(path, rank=rank_of(path, i)) for i, path in enumerate(files)]
        profile = analyse(traces)
        kind = "VERIFY" if self.setup.speculates else "DECODE"
        if kind not in profile.main:
            raise TraceError(f"the trace has {sorted(profile.main)}, no {kind}")
        transfer = getattr(profile.skew.get(kind), "transfer", None)
        return _summary(profile.main[kind], transfer), [s.sentence() for s in profile.slow]

    def _drafting(self) -> list[str]:
        """Rank 0's log lines about draft lengths, without their prefix."""
        said = [line for line in self.server.log_text().splitlines() if "sglang-sm120: " in line]
        said = [line.split("sglang-sm120: ", 1)[1] for line in said if " TP0] " in line]
        return [line for line in said if any(word in line for word in DRAFTING) and line[0] != "{"]

    def _calls(self) -> dict[str, dict[str, int]]:
        path = Path(f"{self._stats}.rank0")
        return json.loads(path.read_text()).get("calls", {}) if path.exists() else {}

    def _metrics(self) -> list[str]:
        with contextlib.suppress(httpx.HTTPError):
            text = httpx.get(f"{self.server.url}/metrics", timeout=20.0).text
            return [line for line in text.splitlines() if "sm120" in line and line[0] != "#"]
        return []


def _summary(report: KindReport, transfer: float | None) -> Passes:
    by: dict[str, list[float]] = {}
    for item in report.passes:
        for segment in item.segments:
            by.setdefault(segment.who, []).append(segment.us)
    count = len(report.passes)
    return Passes(
        span=report.mean("span") / 1e3,
        communication=report.mean("communication") / 1e3,
        transfer=None if transfer is None else transfer / 1e3,
        norms=statistics.fmean(sum(s.norm_us for s in p.segments) for p in report.passes) / 1e3,
        idle=report.mean("idle") / 1e3,
        all_reduces=report.all_reduces,
        by={who: (round(len(us) / count), statistics.fmean(us)) for who, us in by.items()},
    )


def run_all(
    chosen: Sequence[Setup],
    built: Built,
    ranks: int,
    folder: Path,
    *,
    count: int = 8,
    new: int = 64,
    turns: int = 1,
    profile: bool = True,
    on_outcome: Callable[[list[GpuOutcome], list[str]], None] = lambda outcomes, failed: None,
) -> tuple[list[GpuOutcome], list[str]]:
    """Serve with each setup in turn; the outcomes in that order, and what failed as sentences.

    Every server has an MPS of its own, unless the caller's runs: kernels of one that was killed while they waited for
    each other would keep the GPU busy for the next.

    Args:
        turns: how often each setup is served; every other time in reverse order.
        on_outcome: called with outcomes and failures after each server.

    The last setup with our kernels loses a rank at its end: its server must say so and stop.
    """
    outcomes: list[GpuOutcome] = []
    failed: list[str] = []
    order = [
        (turn, setup)
        for turn in range(1, turns + 1)
        for setup in (chosen if turn % 2 else reversed(chosen))
    ]
    last_ours = max((i for i, (_, setup) in enumerate(order) if setup.ours), default=None)
    for i, (turn, setup) in enumerate(order):
        try:
            with shared_gpu.mps():
                trial = GpuTrial(setup, built, ranks, folder, turn)
                try:
                    trial.start()
                    outcome = trial.measure(count, new, profile=profile)
                    if i == last_ours:
                        outcome.death = trial.kill_a_rank()
                    outcomes.append(outcome)
                finally:
                    trial.stop()
        except (ServerError, shared_gpu.RigError) as error:
            failed.append(f"{setup.title}: {error}")
        on_outcome(outcomes, failed)
    return outcomes, failed
