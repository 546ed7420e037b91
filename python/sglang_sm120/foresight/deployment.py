"""What a model costs on a machine before it is bought: passes, verification, speculation, memory, and each remedy.

A pass is the roofline of the compute plus two sums per layer. Not in it: the embedding's sum and the gather of the
logits (two more collectives in a hundred), sampling, and gaps between kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from sglang_sm120.fabric import simulate
from sglang_sm120.fabric.machine import Machine
from sglang_sm120.fabric.rivals import islands_of
from sglang_sm120.foresight import compute, speculation
from sglang_sm120.foresight.compute import Roof
from sglang_sm120.foresight.shapes import Model
from sglang_sm120.foresight.sums import Microseconds, measured


class Estimates(msgspec.Struct, frozen=True):
    """Figures that are neither shapes nor links; each can be set on the command line.

    Attributes:
        norm_us: a separate residual add + RMSNorm kernel at decode sizes, gone when it is fused into the sum (3 to 4 us
            were measured for such kernels on one GPU).
        draft_sums: all-reduces per draft step in SGLang 0.5.23 (embedding, attention, MLP), for both kinds of drafter.
        draft_vocab: rows of the draft head.
        prefetch_bandwidth: share of the memory bandwidth that a prefetch under a sum may take.
        prefetch_l2: share of the L2 that it may fill.
    """

    norm_us: float = 3.0
    draft_sums: int = 3
    draft_vocab: int = 32_000
    prefetch_bandwidth: float = 0.7
    prefetch_l2: float = 0.5


class Setting(msgspec.Struct, frozen=True):
    """What is deployed.

    Attributes:
        machine: the described machine; ranks: which of its GPUs, in rank order.
        model: shapes; roof: card, parallelism and efficiency.
        sequences: sequences decoded together; drafts: draft tokens per pass; context: tokens in each cache.
        acceptance: share of passes in which the first i drafts are right.
        points: measured microseconds of one sum by rows, on the machine as it is; simulated NCCL when empty.
        compute_ms: measured milliseconds of a pass without communication by rows, instead of the roofline.
        drafter: "eagle3" (one dense layer, small vocabulary) or "mtp" (one more layer of the model, whole vocabulary).
        stock: without measured points, NCCL as it comes on AMD hosts: Simple throughout, because it takes every AMD
            socket link for 16 GB/s (src/graph/topo.h); otherwise the better of LL and Simple.
    """

    machine: Machine
    ranks: tuple[int, ...]
    model: Model
    roof: Roof
    sequences: int = 1
    drafts: int = 3
    context: int = 4096
    acceptance: tuple[float, ...] = speculation.DEFAULT_ACCEPTANCE
    points: dict[int, float] = {}
    compute_ms: dict[int, float] = {}
    drafter: Literal["eagle3", "mtp"] = "eagle3"
    stock: bool = False
    estimates: Estimates = Estimates()

    @property
    def rows(self) -> int:
        """Rows of a verify pass: each sequence's last token and its drafts."""
        return self.sequences * (self.drafts + 1)

    @property
    def partition(self) -> tuple[tuple[int, ...], ...]:
        """The machine's islands as positions in `ranks`."""
        return islands_of(self.machine, self.ranks)


class Part(msgspec.Struct, frozen=True):
    """One configuration: how sums run, and whether they are fused and used to prefetch."""

    name: str
    sums: str  # "as is", "tuned", "fused"
    prefetch: bool = False
    best_length: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """What one configuration gives.

    Attributes:
        name: configuration; schedule: what serves the sums.
        sum_us: one sum at verify rows; sums_ms: all of them in a verify pass; compute_ms: the rest of it.
        plain_ms, verify_ms, draft_ms: a plain pass, a verify pass, and drafting.
        plain_steps: what one speculative pass costs in plain ones, which is the break-even accept length.
        drafts, accept_length: draft length used and tokens per pass with the acceptance given.
        plain_tps, tps: tokens per second without and with speculation; best_drafts: the best draft length.
    """

    name: str
    schedule: str
    sum_us: float
    sums_ms: float
    compute_ms: float
    plain_ms: float
    verify_ms: float
    draft_ms: float
    plain_steps: float
    drafts: int
    accept_length: float
    plain_tps: float
    tps: float
    best_drafts: int

    @property
    def pays(self) -> bool:
        """Whether speculation makes more tokens per second than plain decoding."""
        return self.tps > self.plain_tps


PARTS: tuple[Part, ...] = (
    Part("as it is", "as is"),
    Part("best draft length alone", "as is", best_length=True),
    Part("tuned NCCL", "tuned"),
    Part("fused kernels", "fused"),
    Part("fused kernels + prefetch", "fused", prefetch=True),
    Part("all of it + best draft length", "fused", prefetch=True, best_length=True),
)

LONGEST = 8


class Planner:
    """Passes of one `Setting` under each configuration."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._bytes = setting.model.hidden * 2
        self._healthy = simulate.healthy(setting.machine)
        self._kept: dict[tuple[str, int], tuple[float, str]] = {}
        self._as_is: Microseconds = (
            measured(setting.points, lambda rows: self._nccl(self._healthy, rows)[0])
            if setting.points
            else lambda rows: self._nccl(setting.machine, rows, setting.stock)[0]
        )

    def _nccl(self, machine: Machine, rows: int, stock: bool = False) -> tuple[float, str]:
        method = "nccl-simple" if stock else "nccl"
        got = simulate.rival(machine, method, rows * self._bytes, self.setting.ranks)
        return got.total_us, f"NCCL {got.label}"

    def sum_us(self, kind: str, rows: int) -> tuple[float, str]:
        """Microseconds of one all-reduce of `rows` rows, and what serves it; `kind` as in `Part.sums`."""
        if (kind, rows) not in self._kept:
            if kind == "as is":
                got = (self._as_is(rows), "measured" if self.setting.points else "NCCL as it is")
            elif kind == "tuned":
                tuned = self._nccl(self._healthy, rows)
                # Tuning cannot make it slower than it is.
                got = min(tuned, (self._as_is(rows), "as it is"))
            else:
                own = simulate.own_best(
                    self.setting.machine, rows, self.setting.model.hidden, self.setting.ranks
                )
                got = min((own.total_us, own.method), self.sum_us("tuned", rows))
            self._kept[kind, rows] = got
        return self._kept[kind, rows]

    def compute_ms(self, rows: int) -> float:
        """Milliseconds of a pass without communication, unfused norms included."""
        points = self.setting.compute_ms
        if rows in points:
            return points[rows]
        floor = self._roof_ms(rows)
        if points:
            # One measured pass scales the roofline.
            at = min(points, key=lambda r: abs(r - rows))
            return floor * points[at] / self._roof_ms(at)
        return floor

    def _roof_ms(self, rows: int) -> float:
        s = self.setting
        sequences = min(s.sequences, rows)
        cost = compute.forward(s.model, s.roof, rows, sequences, s.context)
        return cost.ms + s.model.fusable_sums * s.estimates.norm_us / 1e3

    def pass_ms(self, part: Part, rows: int) -> tuple[float, float]:
        """(compute, sums) milliseconds of one target pass of `rows` rows, what is hidden taken off the compute."""
        s = self.setting
        us, schedule = self.sum_us(part.sums, rows)
        work = self.compute_ms(rows)
        # Where NCCL stays the fastest, nothing is fused and nothing prefetches.
        if part.sums == "fused" and schedule in simulate.own_names():
            work -= s.model.fusable_sums * s.estimates.norm_us / 1e3
            work -= self.hidden_ms(us) if part.prefetch else 0.0
        return work, s.model.layer_sums * us / 1e3

    def hidden_ms(self, us: float) -> float:
        """Milliseconds of weight reading that prefetches hide in one pass when each sum takes `us` microseconds."""
        s = self.setting
        rate = s.roof.card.memory_gbps * s.roof.efficiency
        room = min(
            s.estimates.prefetch_l2 * s.roof.card.l2_mib * 2**20,
            us * s.estimates.prefetch_bandwidth * rate * 1e3,
        )
        named = compute.bytes_after(s.model, s.roof)
        return sum(min(room, n) for n in named) * s.model.depth / (rate * 1e6)

    def draft_ms(self, part: Part, drafts: int) -> float:
        """Milliseconds of drafting `drafts` tokens per sequence, one step after the other."""
        if not drafts:
            return 0.0
        s = self.setting
        us, _ = self.sum_us(part.sums, s.sequences)
        once, step = self._eagle3_ms() if s.drafter == "eagle3" else self._mtp_ms()
        return once + drafts * (step + s.estimates.draft_sums * us / 1e3)

    def _eagle3_ms(self) -> tuple[float, float]:
        """(once per pass, per step) of an EAGLE-3 head in BF16, without sums: weights that must be read."""
        s = self.setting
        hidden, rate = s.model.hidden, s.roof.card.memory_gbps * s.roof.efficiency * 1e6
        step = (
            2 * hidden * (hidden + hidden // 4)  # attention on embedding and state side by side
            + hidden * hidden
            + 3 * hidden * self._draft_width()
            + hidden * s.estimates.draft_vocab
        )
        fuse = 3 * hidden * hidden  # fc over the aux layers, on every rank
        return 2 * fuse / rate, 2 * step / s.roof.world / rate

    def _mtp_ms(self) -> tuple[float, float]:
        """The same for a multi-token-prediction layer: the model's most frequent layer, a projection and its head."""
        s = self.setting
        layer = max(s.model.layers, key=lambda kind: kind.layers)
        one = msgspec.structs.replace(s.model, layers=(msgspec.structs.replace(layer, layers=1),))
        cost = compute.forward(one, s.roof, s.sequences, s.sequences, s.context)
        rate = s.roof.card.memory_gbps * s.roof.efficiency * 1e6
        project = 2 * s.model.hidden * s.model.hidden * s.model.bits("attention") / 8
        return 0.0, cost.ms + project / rate

    def _draft_width(self) -> int:
        dense = [
            m.outputs
            for layer in self.setting.model.layers
            for m in layer.matrices
            if m.name == "mlp"
        ]
        return max(dense, default=3 * self.setting.model.hidden)

    def speculative_ms(self, part: Part, drafts: int) -> float:
        """Milliseconds of a whole pass with `drafts` drafts; a plain pass with none."""
        work, sums = self.pass_ms(part, self.setting.sequences * (drafts + 1))
        return work + sums + self.draft_ms(part, drafts)

    def outcome(self, part: Part) -> Outcome:
        """Everything about one configuration."""
        s = self.setting
        choices = speculation.lengths(
            lambda drafts: self.speculative_ms(part, drafts), s.acceptance, s.sequences, LONGEST
        )
        best = speculation.best(choices)
        drafts = best.drafts if part.best_length else s.drafts
        rows = s.sequences * (drafts + 1)
        us, schedule = self.sum_us(part.sums, rows)
        work, sums = self.pass_ms(part, rows)
        plain = choices[0]
        used = (
            choices[drafts]
            if drafts <= LONGEST
            else speculation.lengths(
                lambda d: self.speculative_ms(part, d), s.acceptance, s.sequences, drafts
            )[drafts]
        )
        return Outcome(
            name=part.name,
            schedule=schedule,
            sum_us=us,
            sums_ms=sums,
            compute_ms=work,
            plain_ms=plain.ms,
            verify_ms=work + sums,
            draft_ms=used.ms - work - sums,
            plain_steps=speculation.break_even(plain.ms, used.ms),
            drafts=drafts,
            accept_length=used.tokens,
            plain_tps=plain.tokens_per_s,
            tps=used.tokens_per_s,
            best_drafts=best.drafts,
        )

    def outcomes(self, parts: Sequence[Part] = PARTS) -> list[Outcome]:
        """All configurations in order."""
        return [self.outcome(part) for part in parts]

    def loses_at(self, accept_length: float) -> bool:
        """Whether speculation as configured, on the machine as it is, loses at this accept length."""
        part = PARTS[0]
        plain = self.speculative_ms(part, 0)
        return accept_length < self.speculative_ms(part, self.setting.drafts) / plain
