"""How many tokens to draft: the count with the most expected tokens per second, 0 included.

`DraftLengthPolicy` has the methods of SGLang's `AdaptiveSpecPolicy`, so SGLang's own controller runs
it and swaps between the runtime states it captured (EAGLE and EAGLE-3 with topk 1; a state exists for
every candidate step count, 0 meaning a one-row verify pass without drafts).

Every decision is a function of what all ranks hold alike: batch sizes, accepted counts, and the cost
table of rank 0 installed at the same pass. Local clocks never enter. `digest` proves it at run time.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_sm120.verify.acceptance import AcceptanceEstimator
from sglang_sm120.verify.cost import COLD, CostTable


@dataclass(frozen=True)
class PolicyConfig:
    """Tuning of the policy; the defaults are the ones the simulated regimes were checked with.

    Attributes:
        margin: a switch needs this relative gain in expected tokens per second.
        dwell: passes that must pass between two switches of a batch size.
        interval: passes between two looks at the estimates.
        explore: share of serving time that probes may lose.
        purse: most probing time that can be saved up, in passes.
        spread: standard errors of optimism about what was not observed lately.
        first_decision: passes before the first decision, while costs are only guessed.
        probe_tokens: observations a probe gathers, in requests x passes.
        cold: at 0 steps, also leave out the draft-extend pass. The drafter's cache then has a hole,
            so drafting is resumed after `rewarm` passes with draft-extend.
        rewarm: those passes.
        settle: passes at one batch size before `cold` applies; a batch that keeps changing will soon
            draft again.
        max_rows: largest verify batch x (steps + 1) considered; steps 0 is always allowed.
    """

    margin: float = 0.02
    dwell: int = 12
    interval: int = 4
    explore: float = 0.008
    purse: float = 20.0
    spread: float = 1.0
    first_decision: int = 0
    probe_tokens: int = 6
    cold: bool = True
    rewarm: int = 16
    settle: int = 64
    max_rows: int = 256


@dataclass
class _Bucket:
    """Decision state of one captured batch size."""

    steps: int
    since: int = 0
    probe_steps: int = 0
    probe_left: int = 0
    rewarm_left: int = 0


class DraftLengthPolicy:
    """Chooses the draft length per batch size from acceptance and cost.

    Args:
        candidates: step counts SGLang captured states for, each >= 0.
        initial_steps: count to begin with, one of the candidates.
        table: cost table to begin with, the same on every rank.
        config: tuning.

    Raises:
        ValueError: no candidates, a negative one, or an initial count that is not among them.
    """

    def __init__(
        self,
        candidates: Sequence[int],
        initial_steps: int,
        table: CostTable,
        config: PolicyConfig | None = None,
    ) -> None:
        self._candidates = sorted(set(candidates))
        if not self._candidates or self._candidates[0] < 0:
            raise ValueError(f"candidate steps must be >= 0 and not empty, got {list(candidates)}")
        if initial_steps not in self._candidates:
            raise ValueError(
                f"initial steps {initial_steps} are not among the candidates {self._candidates}"
            )
        self.config = config or PolicyConfig()
        # A copy: a live model changes its table by this rank's clock, which no decision may see.
        self.table = table.copy()
        self.initial_steps = initial_steps
        self.acceptance = AcceptanceEstimator(max(1, self._candidates[-1]))
        self._graph_batches: list[int] | None = None
        self._buckets: dict[int, _Bucket] = {}
        self._issued: deque[tuple[int, int]] = deque()
        self._bucket_last = 0
        self._bucket_since = 0
        self._cold = False
        self._credit_ms = 0.0
        self._digest = 0
        # Whether the pass asked for last is a probe, or leads to one.
        self.probing = False
        self.passes = 0
        self.switches = 0
        self.probes = 0

    # -- SGLang's AdaptiveSpecPolicy ------------------------------------------------------------

    @property
    def candidate_steps(self) -> list[int]:
        """Every step count the policy may choose, ascending."""
        return list(self._candidates)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Learn the captured batch sizes; None when graphs are off."""
        self._graph_batches = sorted(cuda_graph_bs) if cuda_graph_bs else None

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Captured batch sizes at which `step` can be chosen; None when graphs are off."""
        if self._graph_batches is None:
            return None
        return [batch for batch in self._graph_batches if step in self.allowed(batch)]

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Step count for the pass that is about to start. Called once per decode pass."""
        bucket_key = self.padded(batch_size)
        bucket = self._bucket(bucket_key)
        if bucket_key != self._bucket_last:
            self._bucket_last, self._bucket_since = bucket_key, self.passes
        self.probing = bucket.probe_left > 0 or bucket.rewarm_left > 0
        steps = bucket.probe_steps if bucket.probe_left > 0 else bucket.steps
        if steps > 0 and self._cold and self.config.rewarm > 0:
            bucket.rewarm_left = self.config.rewarm
        if bucket.rewarm_left > 0:
            bucket.rewarm_left -= 1
            steps = 0
            self._cold = False
        elif bucket.probe_left > 0:
            bucket.probe_left -= 1
            self._cold = False
        else:
            settled = self.passes - self._bucket_since >= self.config.settle
            self._cold = self.config.cold and steps == 0 and settled
        self._issued.append((COLD if self._cold else steps, bucket_key))
        return steps

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int
    ) -> int | None:
        """Take in the accepted drafts of the oldest pass not reported yet.

        Returns None always: a change takes effect when the next pass asks for its step count, so that
        a pass already under way is never disturbed.

        Args:
            num_correct_drafts_per_req: accepted drafts of each request.
            batch_size: requests of that pass.
        """
        if not self._issued:
            raise RuntimeError(
                f"acceptance of a pass of {batch_size} requests was reported, but no pass is open"
            )
        steps, bucket_key = self._issued.popleft()
        self.acceptance.observe(max(0, steps), num_correct_drafts_per_req)
        self.passes += 1
        self._digest = zlib.crc32(
            bytes((steps & 255, *(n & 255 for n in num_correct_drafts_per_req))), self._digest
        )
        self._earn(steps, bucket_key)
        if self.passes >= self.config.first_decision and self.passes % self.config.interval == 0:
            self._decide(bucket_key)
        return None

    # -- shared state ---------------------------------------------------------------------------

    def install(self, table: CostTable) -> None:
        """Replace the cost table; every rank must do so after the same number of passes."""
        self.table = table.copy()

    @property
    def digest(self) -> int:
        """32-bit checksum over every step count and accepted count so far; equal on all ranks."""
        return self._digest

    @property
    def skips_draft_extend(self) -> bool:
        """Whether the pass that was asked for last is to leave out draft-extend."""
        return self._cold

    def chosen(self, batch: int) -> int:
        """The step count settled on for a captured batch size, probes aside."""
        return self._bucket(batch).steps

    def padded(self, batch_size: int) -> int:
        """The captured batch size a batch runs at; above the widest, and without graphs, the next power of two.

        Every size that is told apart has a row in the cost table, which must stay small enough to send.
        """
        captured = self._graph_batches or []
        at = bisect_left(captured, batch_size)
        return captured[at] if at < len(captured) else 1 << max(0, batch_size - 1).bit_length()

    def allowed(self, batch: int) -> list[int]:
        """Candidates whose verify batch stays within the row limit; never empty."""
        fits = [s for s in self._candidates if s == 0 or batch * (s + 1) <= self.config.max_rows]
        return fits or self._candidates[:1]

    def rate(self, steps: int, batch: int, *, optimistic: bool = False) -> float:
        """Expected tokens per millisecond and request of a step count.

        tokens(steps) / pass_ms(steps, batch): the expected accepted length over the predicted cost.
        """
        spread = self.config.spread if optimistic else 0.0
        tokens = self.acceptance.tokens(steps, spread=spread)
        shape = COLD if steps == 0 and self.config.cold else steps
        return tokens / self.table.pass_ms(shape, batch, optimistic=optimistic)

    # -- decisions ------------------------------------------------------------------------------

    def _bucket(self, batch: int) -> _Bucket:
        bucket = self._buckets.get(batch)
        if bucket is None:
            allowed = self.allowed(batch)
            if self.passes == 0:
                steps = self.initial_steps if self.initial_steps in allowed else allowed[-1]
            else:
                # Acceptance is known from other batch sizes: begin where the estimates point.
                steps = max(allowed, key=lambda s: self.rate(s, batch))
            bucket = self._buckets[batch] = _Bucket(steps, self.passes)
        return bucket

    def _loss_ms(self, probe: int, passes: int, current: int, batch: int) -> float:
        """Time a probe wastes against producing its tokens with `current`."""
        rate = self.rate(current, batch)
        pass_ms = self.table.pass_ms(probe, batch)
        loss = passes * max(0.0, pass_ms - self.acceptance.tokens(probe) / rate)
        if self._cold and probe > 0:
            loss += self.config.rewarm * max(0.0, self.table.pass_ms(0, batch) - 1.0 / rate)
        return loss

    def _earn(self, steps: int, batch: int) -> None:
        spent = self.table.pass_ms(steps, batch)
        # A quiet hour must not pay for a minute of probing.
        cap = self.config.purse * spent
        self._credit_ms = min(cap, self._credit_ms + self.config.explore * spent)

    def _decide(self, batch: int) -> None:
        bucket = self._bucket(batch)
        if bucket.probe_left > 0 or bucket.rewarm_left > 0:
            return
        allowed = self.allowed(batch)
        current = bucket.steps
        current_rate = self.rate(current, batch)
        best = max(allowed, key=lambda s: self.rate(s, batch))
        if (
            best != current
            and self.passes - bucket.since >= self.config.dwell
            and self.rate(best, batch) > current_rate * (1.0 + self.config.margin)
        ):
            bucket.steps = best
            bucket.since = self.passes
            self.switches += 1
            return
        self._maybe_probe(bucket, batch, allowed, current_rate)

    def _maybe_probe(
        self, bucket: _Bucket, batch: int, allowed: Sequence[int], current_rate: float
    ) -> None:
        """Try a count that could be better than it looks, when the budget pays for it."""
        count = max(1, -(-self.config.probe_tokens // batch))
        chosen, chosen_worth, chosen_loss = -1, 0.0, 0.0
        for steps in allowed:
            if steps == bucket.steps:
                continue
            hope = self.rate(steps, batch, optimistic=True) / current_rate - 1.0
            if hope <= self.config.margin:
                continue
            loss = self._loss_ms(steps, count, bucket.steps, batch)
            worth = hope / (loss + 0.05 * self.table.pass_ms(bucket.steps, batch))
            if worth > chosen_worth:
                chosen, chosen_worth, chosen_loss = steps, worth, loss
        if chosen >= 0 and chosen_loss <= self._credit_ms:
            self._credit_ms -= chosen_loss
            bucket.probe_steps = chosen
            bucket.probe_left = count
            self.probes += 1
