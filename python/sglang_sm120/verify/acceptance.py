"""What share of drafted tokens is accepted, position by position, and how sure we are of it.

Only +, -, *, / and square roots are used, which IEEE 754 rounds exactly: ranks that see the same
accepted counts hold the same floats, whatever their libm.
"""

from __future__ import annotations

import math

# One pseudo-observation set for positions nobody has drafted yet. 0.6 is the middle of published
# first-position rates of EAGLE-3 and MTP heads (0.4 to 0.85).
PRIOR_RATE = 0.6
PRIOR_WEIGHT = 2.0
# Deeper positions lean on the position before them: published conditional rates are nearly flat.
PARENT_WEIGHT = 3.0
# Evidence about a position that is not being drafted is forgotten this fast: the text moves on.
IDLE_PASSES = 64
# However many tokens were counted, the next ones are not the same text: no rate is surer than this.
SUREST = 16.0


class _Window:
    """Success and trial counts per position, discounted by a factor per pass."""

    __slots__ = ("_keep", "_keep_idle", "trials", "hits")

    def __init__(self, positions: int, passes: int) -> None:
        self._keep = 1.0 - 1.0 / passes
        self._keep_idle = 1.0 - 1.0 / min(passes, IDLE_PASSES)
        self.trials = [0.0] * positions
        self.hits = [0.0] * positions

    def age(self, steps: int) -> None:
        for i in range(len(self.trials)):
            keep = self._keep if i < steps else self._keep_idle
            self.trials[i] *= keep
            self.hits[i] *= keep

    def add(self, steps: int, accepted: list[int]) -> None:
        ended_at = [0] * (steps + 1)
        for count in accepted:
            ended_at[count] += 1
        reached = float(len(accepted))
        for i in range(steps):
            self.trials[i] += reached
            reached -= ended_at[i]
            self.hits[i] += reached

    def copy_from(self, other: _Window) -> None:
        self.trials[:] = other.trials
        self.hits[:] = other.hits


class AcceptanceEstimator:
    """Conditional acceptance rates q_i = P(draft i accepted | drafts 1..i-1 accepted).

    Counts are pooled over the requests of a batch, so that products of the q_i give the mean accepted
    length of the mixture. Two discounted windows run side by side; when the short one contradicts the
    long one, the long one is restarted from it, so a change of text is followed within a few passes
    while steady text is averaged over many.

    Args:
        max_steps: deepest position, >= 1.
        long_passes: memory of the long window, in passes.
        short_passes: memory of the short window, in passes.
        surprise: standard errors between the windows that count as a change.
    """

    def __init__(
        self,
        max_steps: int,
        *,
        long_passes: int = 256,
        short_passes: int = 24,
        surprise: float = 3.5,
    ) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        self.max_steps = max_steps
        self._long = _Window(max_steps, long_passes)
        self._short = _Window(max_steps, short_passes)
        self._surprise = surprise
        self._rates = [PRIOR_RATE] * max_steps
        self._drafted = [False] * max_steps
        # What a position is believed to do when its counts have faded: the last rate seen there.
        self._anchors: list[float | None] = [None] * max_steps
        self.changes = 0

    def observe(self, steps: int, accepted: list[int]) -> None:
        """Take in one verify pass.

        Args:
            steps: drafts per request in that pass, 0..max_steps; 0 only ages what is known.
            accepted: accepted drafts of each request, each 0..steps.

        Raises:
            ValueError: a count is outside 0..steps.
        """
        if accepted and not 0 <= min(accepted) <= max(accepted) <= steps:
            raise ValueError(f"accepted drafts {accepted} do not fit a pass of {steps} steps")
        self._long.age(steps)
        self._short.age(steps)
        if steps and accepted:
            self._long.add(steps, accepted)
            self._short.add(steps, accepted)
            if self._contradicts():
                self._long.copy_from(self._short)
                self.changes += 1
        self._refresh(steps if accepted else 0)

    def _contradicts(self) -> bool:
        for i in range(min(2, self.max_steps)):
            n_short, n_long = self._short.trials[i], self._long.trials[i]
            n_old = n_long - n_short
            if n_short < 8.0 or n_old < 8.0:
                continue
            short = self._short.hits[i] / n_short
            old = (self._long.hits[i] - self._short.hits[i]) / n_old
            pooled = self._long.hits[i] / n_long
            error = math.sqrt(max(pooled * (1.0 - pooled), 0.01) * (1.0 / n_short + 1.0 / n_old))
            if abs(short - old) > self._surprise * error:
                return True
        return False

    def _refresh(self, steps: int) -> None:
        parent, weight = PRIOR_RATE, PRIOR_WEIGHT
        for i in range(self.max_steps):
            trials = self._long.trials[i]
            if i >= steps and self._drafted[i]:
                # Frozen when drafting stops here: feeding it back each pass would count it twice.
                self._anchors[i] = self._rates[i]
            self._drafted[i] = i < steps
            anchor = self._anchors[i]
            if anchor is not None:
                parent, weight = anchor, PRIOR_WEIGHT
            self._rates[i] = (self._long.hits[i] + weight * parent) / (trials + weight)
            parent, weight = self._rates[i], PARENT_WEIGHT

    def rate(self, position: int) -> float:
        """Estimated q of a position, 1-based."""
        return self._rates[position - 1]

    def trials(self, position: int) -> float:
        """Effective number of recent observations of a position, 1-based."""
        return self._long.trials[position - 1]

    def tokens(self, steps: int, *, spread: float = 0.0) -> float:
        """Expected tokens per request and pass: 1 + q1 + q1 q2 + ... + q1..q_steps.

        Args:
            steps: drafts per pass.
            spread: standard errors added to each rate; positive values give an optimistic bound that
                is wide where nothing was observed lately.
        """
        total, chain = 1.0, 1.0
        for i in range(steps):
            rate = self._rates[i]
            if spread:
                n = min(self._long.trials[i], SUREST) + 0.1
                rate = min(0.98, rate + spread * math.sqrt(max(rate * (1.0 - rate), 0.04) / n))
            chain *= rate
            total += chain
        return total
