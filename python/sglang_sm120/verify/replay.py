"""Play a draft-length policy against a recorded or generated trace, on a described machine.

A trace says, for every position of every request's text, how many drafts in a row would be accepted
if drafting began there. That is a property of text and drafter alone, so every policy can be played
on the same trace, and a fixed step count gives the answer in hindsight. Everything here is simulated.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_sm120.verify.cost import COLD

# (steps or COLD, batch, seconds since start) -> milliseconds of one pass
CostFunction = Callable[[int, int, float], float]

# After a hole of this many tokens in its cache a drafter is taken to be as bad as it gets,
# and to lose this share of its accepted runs until as many new tokens were seen. Assumed.
HOLE_TOKENS = 32
HOLE_LOSS = 0.5


class StepPolicy(Protocol):
    """What the player asks of a policy: the part of SGLang's `AdaptiveSpecPolicy` used while serving."""

    def get_steps_for_batch(self, batch_size: int) -> int: ...

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int
    ) -> int | None: ...


class FixedSteps:
    """The same step count for ever; COLD is a server without speculation."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def get_steps_for_batch(self, batch_size: int) -> int:
        return max(0, self.steps)

    @property
    def skips_draft_extend(self) -> bool:
        return self.steps == COLD

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int
    ) -> int | None:
        return None


@dataclass
class Trace:
    """Accepted run lengths.

    Attributes:
        runs: uint8 [requests, positions], drafts in a row accepted from each position.
        tokens: tokens to serve in all; the player stops there.
    """

    runs: npt.NDArray[np.uint8]
    tokens: int


@dataclass
class Outcome:
    """What a policy achieved on a trace.

    Attributes:
        tokens: tokens served.
        seconds: simulated time.
        steps: passes per step count.
    """

    tokens: int
    seconds: float
    passes: int
    steps: Counter[int] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def accept_length(self) -> float:
        """Tokens per request and pass."""
        return self.tokens / self.passes


def play(
    policy: StepPolicy,
    trace: Trace,
    cost: CostFunction,
    *,
    seed: int = 0,
    noise: float = 0.03,
    lag: int = 1,
    on_pass: Callable[[int, int, float], None] | None = None,
) -> Outcome:
    """Serve a trace.

    Args:
        policy: asked before each pass, told the accepted drafts `lag` passes later, as SGLang's
            overlap schedule does.
        trace: text of each request; a request that ends begins anew.
        cost: true cost of a pass.
        seed: of the timing noise, equal for every policy.
        noise: relative standard deviation of one measured pass; one in 200 takes twice as long.
        lag: passes between a pass and the report of its acceptance.
        on_pass: receives (steps or COLD, batch, measured ms) of each pass.
    """
    rng = random.Random(seed)
    # Plain lists: a pass touches one entry per request, where arrays cost more than they save.
    runs: list[list[int]] = trace.runs.tolist()
    requests, length = trace.runs.shape
    at = [0] * requests
    hole = [0] * requests
    outcome = Outcome(0, 0.0, 0)
    reports: deque[list[int]] = deque()
    while outcome.tokens < trace.tokens:
        steps = policy.get_steps_for_batch(requests)
        cold = steps == 0 and bool(getattr(policy, "skips_draft_extend", False))
        true_ms = cost(COLD if cold else steps, requests, outcome.seconds)
        accepted = [min(run[i % length], steps) for run, i in zip(runs, at)]
        if cold:
            hole = [min(h + 1, HOLE_TOKENS) for h in hole]
        elif any(hole):
            for r, tokens in enumerate(hole):
                if rng.random() < HOLE_LOSS * tokens / HOLE_TOKENS:
                    accepted[r] = 0
                hole[r] = max(tokens - accepted[r] - 1, 0)
        for r, n in enumerate(accepted):
            at[r] += n + 1
        outcome.tokens += sum(accepted) + requests
        outcome.passes += requests
        outcome.seconds += true_ms / 1000.0
        outcome.steps[steps] += 1
        if on_pass is not None:
            factor = max(0.5, rng.gauss(1.0, noise))
            if rng.random() < 0.005:
                factor *= 2.0
            on_pass(COLD if cold else steps, requests, true_ms * factor)
        reports.append(accepted)
        if len(reports) > lag:
            policy.on_verify_complete(reports.popleft(), requests)
    return outcome


def runs_from_rates(rates: Sequence[npt.NDArray[np.float64]], seed: int) -> npt.NDArray[np.uint8]:
    """Draw accepted runs from conditional acceptance rates.

    Args:
        rates: one array [requests, positions] per draft position, values in 0..1.
        seed: of the draw.

    Returns:
        uint8 [requests, positions].
    """
    rng = np.random.default_rng(seed)
    alive = np.ones(rates[0].shape, dtype=bool)
    runs = np.zeros(rates[0].shape, dtype=np.uint8)
    for rate in rates:
        alive &= rng.random(rate.shape) < rate
        runs += alive
    return runs


def runs_from_prompt_lookup(
    tokens: Sequence[str], *, depth: int, match: int = 2
) -> npt.NDArray[np.uint8]:
    """Accepted runs of an n-gram drafter on a real text, position by position.

    At each position the drafter looks for the latest earlier occurrence of the last `match` tokens
    and proposes what followed it; the run is how much of that is what the text really says.

    Args:
        tokens: the text.
        depth: longest proposal.
        match: tokens that must match.

    Returns:
        uint8 [len(tokens)].
    """
    seen: dict[tuple[str, ...], int] = {}
    runs = np.zeros(len(tokens), dtype=np.uint8)
    for at in range(match, len(tokens)):
        key = tuple(tokens[at - match : at])
        source = seen.get(key)
        if source is not None:
            run = 0
            while (
                run < depth
                and at + run < len(tokens)
                and source + run < at
                and tokens[source + run] == tokens[at + run]
            ):
                run += 1
            runs[at] = run
        seen[key] = at
    return runs
