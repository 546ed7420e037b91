"""Simulated: draft-length policies against every fixed step count, on a dozen machines and texts.

    python benchmark/policy_regimes.py [--out results/policy_regimes.json] [--plot results/policy_regimes.png]

Every figure is simulated: traces of accepted runs (verify/replay.py) are played on cost functions taken
from published measurements. SGLang's own adaptive policy, the installed class, plays the same traces.

Sources of the costs (all public):
  team     30 ms verify / 12.2 ms plain on 8 PCIe GPUs, all-reduce ~ 10 + 3.4 us per KiB, 122 per pass
  fused    one-shot all-reduce + RMSNorm on 8 SM120 GPUs, ~ 9.2 + 0.255 us per KiB (b12x documentation)
  k26      Kimi-K2.6 on 8 RTX PRO 6000, tokens/s with and without EAGLE-3 k=3 at concurrency 1 to 128
           (local-inference-lab/rtx6kpro, models/kimi-k26-v3.md); DCP8 column for the case where k=3 loses
  glm      GLM-5.3-Flash TP4, 170.6 tok/s plain, 276 with MTP 3 (b12x pull request 269)
Acceptance: Kimi-K2.6 positions .645/.393/.240, GLM-5 .80/.55/.28, model card 2.9 at k=3, synthetic 1.2, 3.5.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sglang_sm120.verify.cost import COLD, CostModel, StageTimes, load_table
from sglang_sm120.verify.policy import DraftLengthPolicy, PolicyConfig
from sglang_sm120.verify.replay import (
    FixedSteps,
    Outcome,
    Trace,
    play,
    runs_from_prompt_lookup,
    runs_from_rates,
)

CANDIDATES = (0, 1, 2, 3, 5, 7)
INITIAL = 3
DEPTH = 8
WARM_BATCHES = (1, 2, 4, 8, 16, 32, 64)
# What the controller sees: rank 0's table is distributed this often (passes), this late.
PERIOD, DELAY = 64, 8
# Served contexts are longer than the warm-up's: every real pass costs this much more.
CONTEXT = 1.06

Microseconds = Callable[[float], float]


@dataclass(frozen=True)
class Machine:
    """A cost function with the stage times a warm-up would have measured on it."""

    name: str
    stages: Callable[[int, int], StageTimes]
    # Factor on the communication part at a time (seconds); 1.0 when the fabric is steady.
    fabric: Callable[[float], float] = lambda seconds: 1.0

    def cost(self, steps: int, batch: int, seconds: float) -> float:
        total, comm = self._split(steps, batch)
        return CONTEXT * (total + (self.fabric(seconds) - 1.0) * comm)

    @functools.cache  # noqa: B019 (machines live as long as the script)
    def _split(self, steps: int, batch: int) -> tuple[float, float]:
        times = self.stages(max(0, steps), batch)
        total = times.pass_ms - (times.extend_ms if steps == COLD else 0.0)
        return total, times.comm_ms * total / times.pass_ms

    def warm_up(self) -> list[StageTimes]:
        return [self.stages(s, b) for s in CANDIDATES for b in WARM_BATCHES]


def kimi(name: str, allreduce_us: Microseconds) -> Machine:
    """Kimi-K2.5 TP8: 61 layers, hidden 7168, INT4 experts over 1.7 TB/s; 5 ms compute up to 4 rows."""

    def compute_ms(rows: int) -> float:
        # Distinct experts of 384 that `rows` tokens with 8 each touch; 2.75 MB per rank and expert.
        experts = [384.0 * (1.0 - (1.0 - 8.0 / 384.0) ** r) for r in (4, max(4, rows))]
        return 5.0 + 60 * 2.75e6 * (experts[1] - experts[0]) / 1.7e12 * 1e3

    @functools.cache
    def stages(steps: int, batch: int) -> StageTimes:
        rows = batch * (steps + 1)
        verify_comm = 122 * allreduce_us(14.0 * rows) / 1e3
        draft_comm = 3 * allreduce_us(14.0 * batch) / 1e3
        extend_comm = 3 * allreduce_us(14.0 * rows) / 1e3
        drafts = max(0, steps - 1)
        return StageTimes(
            steps=steps,
            batch=batch,
            draft_ms=drafts * (0.8 + draft_comm),
            verify_ms=compute_ms(rows) + verify_comm,
            extend_ms=0.5 + extend_comm,
            comm_ms=verify_comm + drafts * draft_comm + extend_comm,
        )

    return Machine(name, stages)


def published(
    name: str, plain_ms: dict[int, float], k3_ms: dict[int, float], comm: float
) -> Machine:
    """Step times at 0 and 3 drafts per batch size; other counts lie on the line through both.

    Args:
        comm: share of a pass that is communication [assumed].
    """
    batches = sorted(plain_ms)

    @functools.cache
    def stages(steps: int, batch: int) -> StageTimes:
        zero = float(np.interp(batch, batches, [plain_ms[b] for b in batches]))
        three = float(np.interp(batch, batches, [k3_ms[b] for b in batches]))
        extend = 0.03 * zero
        rest = (three - zero - extend) * steps / 3.0
        total = zero + extend + rest
        return StageTimes(steps, batch, 0.3 * rest, zero + 0.7 * rest, extend, comm_ms=comm * total)

    return Machine(name, stages)


def _from_rates(plain: dict[int, float], spec: dict[int, float], accept: float) -> tuple:
    return (
        {c: 1e3 * c / r for c, r in plain.items()},
        {c: 1e3 * c * accept / r for c, r in spec.items()},
    )


TEAM = kimi("team", lambda kib: 10.0 + 3.4 * kib)
FUSED = kimi("fused", lambda kib: 9.2 + 0.255 * kib)
K26 = published(
    "k26",
    *_from_rates(
        {1: 91.4, 8: 406.9, 32: 962.8, 64: 1518, 128: 2310},
        {1: 110.1, 8: 507.9, 32: 1221, 64: 1782, 128: 2407},
        2.28,
    ),
    comm=0.4,
)
K26_DCP8 = published(
    "k26-dcp8",
    *_from_rates(
        {1: 76.2, 32: 673.8, 64: 1042, 128: 1383}, {1: 92.5, 32: 697, 64: 937, 128: 1151}, 2.28
    ),
    comm=0.5,
)
GLM = published("glm", {1: 5.86, 64: 60.0}, {1: 9.2, 64: 110.0}, comm=0.3)


def unsteady(machine: Machine, period_s: float, factor: float) -> Machine:
    """The same machine whose fabric is `factor` times slower in every second period."""
    return Machine(
        machine.name,
        machine.stages,
        lambda seconds: factor if int(seconds / period_s) % 2 else 1.0,
    )


FIELD = (0.645, 0.609, 0.611, 0.6, 0.6, 0.6, 0.6, 0.6)
GLM5 = (0.80, 0.69, 0.51, 0.5, 0.5, 0.5, 0.5, 0.5)
CARD = (0.80, 0.78, 0.77, 0.76, 0.75, 0.74, 0.73, 0.72)
POOR = (0.17, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2)
RICH = (0.93, 0.91, 0.90, 0.90, 0.89, 0.89, 0.88, 0.88)

Mix = Callable[[int, int], npt.NDArray[np.float64]]


def steady_text(rates: Sequence[float]) -> Callable[[int, int], list[npt.NDArray[np.float64]]]:
    return lambda requests, length: [np.full((requests, length), r) for r in rates]


def blend(low: Sequence[float], high: Sequence[float], weight: Mix):
    """Rates between two levels; `weight` [requests, positions] says how near to `high`."""

    def text(requests: int, length: int) -> list[npt.NDArray[np.float64]]:
        w = weight(requests, length)
        return [a + (b - a) * w for a, b in zip(low, high)]

    return text


def wave(period: int) -> Mix:
    """All requests drift together, slowly up and down."""

    def weight(requests: int, length: int) -> npt.NDArray[np.float64]:
        phase = np.arange(length) / period
        return np.tile(np.abs((phase % 2.0) - 1.0), (requests, 1))

    return weight


def blocks(period: int) -> Mix:
    """All requests jump between two kinds of text."""

    def weight(requests: int, length: int) -> npt.NDArray[np.float64]:
        return np.tile((np.arange(length) // period % 2).astype(np.float64), (requests, 1))

    return weight


def mixed(period: int) -> Mix:
    """Every request alternates on its own: a batch is always a mixture."""

    def weight(requests: int, length: int) -> npt.NDArray[np.float64]:
        shift = (np.arange(requests) * 7919) % (2 * period)
        return ((np.arange(length)[None, :] + shift[:, None]) // period % 2).astype(np.float64)

    return weight


@dataclass(frozen=True)
class Regime:
    """One row of the table."""

    name: str
    machine: Machine
    batch: int
    tokens: int
    text: Callable[[int, int], list[npt.NDArray[np.float64]]] | None

    def trace(self, scale: float = 1.0, seed: int = 0) -> Trace:
        """The regime's text; `scale` shortens it, for tests; `seed` draws it anew."""
        tokens = int(self.tokens * scale)
        if self.text is None:
            source = Path(argparse.__file__).read_text(encoding="utf-8")
            words = re.findall(r"\w+|[^\w\s]|\n\s*", source)
            return Trace(runs_from_prompt_lookup(words, depth=DEPTH)[None, :], tokens)
        length = 2 * tokens // self.batch + 64
        seed = 7919 * seed + sum(map(ord, self.name))
        return Trace(runs_from_rates(self.text(self.batch, length), seed), tokens)


REGIMES = (
    Regime("collapsed fabric, field acceptance 2.3, C1", TEAM, 1, 16000, steady_text(FIELD)),
    Regime("collapsed fabric, acceptance 1.2, C1", TEAM, 1, 12000, steady_text(POOR)),
    Regime("collapsed fabric, text jumps 1.2 / 3.5, C1", TEAM, 1, 24000, blend(POOR, RICH, blocks(4000))),
    Regime("fused fabric, field acceptance, C1", FUSED, 1, 20000, steady_text(FIELD)),
    Regime("fused fabric, acceptance 3.5, C4", FUSED, 4, 40000, steady_text(RICH)),
    Regime("fused fabric, text drifts 1.2 to 3.5, C1", FUSED, 1, 30000, blend(POOR, RICH, wave(5000))),
    Regime("fused fabric, acceptance 1.2, C32", FUSED, 32, 100000, steady_text(POOR)),
    Regime("Kimi-K2.6 published, model card 2.9, C8", K26, 8, 60000, steady_text(CARD)),
    Regime("Kimi-K2.6 published, mixed texts, C16", K26, 16, 100000, blend(POOR, RICH, mixed(300))),
    Regime("Kimi-K2.6 DCP8, where 3 drafts lose, C64", K26_DCP8, 64, 200000, steady_text(FIELD)),
    Regime("GLM published, GLM-5 positions, C1", GLM, 1, 20000, steady_text(GLM5)),
    Regime("fabric slows 6x every 40 s, C1", unsteady(FUSED, 40.0, 6.0), 1, 30000, steady_text(FIELD)),
    Regime("real source text, prompt lookup, Kimi published, C1", K26, 1, 16000, None),
)  # fmt: skip


def run_ours(
    regime: Regime, trace: Trace, config: PolicyConfig | None = None, seed: int = 0
) -> Outcome:
    """Our policy with a live cost model, its table installed as late as the other ranks get it."""
    model = CostModel(regime.machine.warm_up())
    policy = DraftLengthPolicy(CANDIDATES, INITIAL, model.table, config)
    policy.set_cuda_graph_bs(list(WARM_BATCHES))
    sent: list[tuple[int, bytes]] = []

    def on_pass(steps: int, batch: int, ms: float) -> None:
        model.observe(steps, policy.padded(batch), ms)
        if policy.passes % PERIOD == 0:
            sent.append((policy.passes + DELAY, model.snapshot()))
        if sent and policy.passes >= sent[0][0]:
            policy.install(load_table(sent.pop(0)[1]))

    return play(policy, trace, regime.machine.cost, seed=seed, on_pass=on_pass)


def stock_policy(config_path: str | None = None):
    """SGLang's own adaptive policy, or None when SGLang is not installed."""
    try:
        from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams
    except ImportError:
        return None
    policy = AdaptiveSpeculativeParams(initial_steps=INITIAL, cfg_path=config_path)
    policy.set_cuda_graph_bs(list(WARM_BATCHES))
    return policy


def compare(regime: Regime, *, with_stock: bool, scale: float = 1.0, seed: int = 0) -> dict:
    """Play one regime; returns tokens/s of each contender and the ratios the table shows."""
    trace = regime.trace(scale, seed)
    fixed = {s: play(FixedSteps(s), trace, regime.machine.cost) for s in (COLD, *CANDIDATES)}
    ours = run_ours(regime, trace, seed=seed)
    best = max((s for s in fixed if s != COLD), key=lambda s: fixed[s].rate)
    plain = fixed[COLD].rate
    best_rate = max(plain, fixed[best].rate)
    row = {
        "regime": regime.name,
        "batch": regime.batch,
        "plain": plain,
        "fixed": {s: fixed[s].rate for s in CANDIDATES},
        "best_steps": best if fixed[best].rate >= plain else COLD,
        "best": best_rate,
        "ours": ours.rate,
        "ours_accept": ours.accept_length,
        "ours_steps": dict(sorted(ours.steps.items())),
        "seconds": ours.seconds,
        "ours_over_best": ours.rate / best_rate,
        "ours_over_plain": ours.rate / plain,
    }
    if with_stock and (stock := stock_policy()) is not None:
        rate = play(stock, trace, regime.machine.cost).rate
        row |= {
            "stock": rate,
            "stock_over_best": rate / best_rate,
            "ours_over_stock": ours.rate / rate,
        }
    return row


def table(rows: Iterable[dict]) -> str:
    """The comparison as a Markdown table."""
    lines = [
        "Simulated tokens per second (no GPU was used; see the sources in the script's head)",
        "",
        "| regime | plain | best fixed | steps | ours | /best | /plain | worst of seeds /best, /plain "
        "| stock adaptive | /best |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        steps = "plain" if row["best_steps"] == COLD else row["best_steps"]
        stock = f"{row['stock']:.1f} | {row['stock_over_best']:.3f}" if "stock" in row else "- | -"
        lines.append(
            f"| {row['regime']} | {row['plain']:.1f} | {row['best']:.1f} | {steps} "
            f"| {row['ours']:.1f} | {row['ours_over_best']:.3f} | {row['ours_over_plain']:.3f} "
            f"| {row['worst_ours_over_best']:.3f}, {row['worst_ours_over_plain']:.3f} | {stock} |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict], path: Path) -> None:
    """Each contender relative to the best fixed count, one group of bars per regime."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.55 * len(rows) + 1.6), constrained_layout=True)
    at = np.arange(len(rows))
    bars = [("plain", "#b0b7bf"), ("stock", "#d98c3f"), ("ours", "#2a6f97")]
    for offset, (key, colour) in zip((0.27, 0.0, -0.27), bars):
        values = [row[key] / row["best"] if key in row else 0.0 for row in rows]
        axes.barh(at + offset, values, 0.25, label=key, color=colour)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.axvline(0.95, color="black", linewidth=0.6, linestyle=":")
    axes.set_yticks(at, [row["regime"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second relative to the best fixed step count in hindsight")
    axes.set_title("Draft-length policies, simulated on published costs", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    results = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=results / "policy_regimes.json")
    parser.add_argument("--plot", type=Path, default=results / "policy_regimes.png")
    parser.add_argument("--seeds", type=int, default=2, help="texts drawn per regime")
    parser.add_argument("--no-stock", action="store_true", help="leave SGLang's own policy out")
    args = parser.parse_args()
    rows = []
    for regime in REGIMES:
        runs = [compare(regime, with_stock=not args.no_stock, seed=s) for s in range(args.seeds)]
        worst = {
            f"worst_{key}": min(run[key] for run in runs)
            for key in ("ours_over_best", "ours_over_plain")
        }
        rows.append(runs[0] | worst)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"rig": "simulated", "rows": rows}, indent=1))
    plot(rows, args.plot)
    print(table(rows))


if __name__ == "__main__":
    main()
