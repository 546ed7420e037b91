"""Choosing one candidate per row count from their times: near the fastest everywhere, few changes, never back again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sglang_sm120.comm.plan import BASELINE

MARGIN = 0.03  # how much faster than the baseline a candidate must be at every row count it serves
SWITCH_COST = 0.02  # what changing the candidate between neighbouring rows must gain, relative
NEAR = 0.03  # how close to the fastest counts as nearly so, where candidates are put in order
LOYALTY = 0.03  # what the choice of the previous plan is worth, so that noise does not move it
# How much faster than anything of ours a backend must be: FlashInfer's waits have no bound, and its sums have not the
# canonical bits.
HANDICAP = {"flashinfer": 0.1}


class PlanRefused(RuntimeError):
    """A pinned backend cannot serve; the text says why and what to change."""


def cheapest_path(curves: Mapping[str, Sequence[float]], before: Sequence[str]) -> list[str]:
    """One candidate per row count: near the fastest everywhere, few changes, never back again.

    Candidates are ordered by the row counts at which they are nearly the fastest; the choice may only move forward in
    that order (a candidate serves one unbroken range of rows). Among such paths the one with the least total excess over
    the fastest, plus `SWITCH_COST` per change, wins. Where the baseline is among the candidates, one that is not
    `MARGIN` faster than it is not allowed; `before` names the previous choice per row count.

    Returns:
        Names, one per row count; the baseline where nothing else is allowed.

    Raises:
        PlanRefused: no candidate has a finite time at some row count and there is no baseline.
    """
    length = len(before)
    base = curves.get(BASELINE)

    def effective(name: str, i: int) -> float:
        t = curves[name][i]
        if name == BASELINE:
            return t if math.isfinite(t) else 1e12  # always allowed: it is what SGLang does anyway
        if base is not None and math.isfinite(base[i]) and t > base[i] * (1 - MARGIN):
            return math.inf
        t *= 1 + HANDICAP.get(name.split("/")[0], 0.0)
        return t * (1 - LOYALTY) if name == before[i] else t

    costs = {n: [effective(n, i) for i in range(length)] for n in curves}
    floors = [min(c[i] for c in costs.values()) for i in range(length)]
    for i, floor in enumerate(floors):
        if not math.isfinite(floor):
            raise PlanRefused(f"no candidate works at entry {i} of {length}")

    def centre(name: str) -> float:
        """Mean position of the rows at which a candidate is nearly the fastest; infinite when it never is."""
        weights = [
            max(0.0, 1 + NEAR - t / floor) for t, floor in zip(costs[name], floors, strict=True)
        ]
        total = sum(weights)
        return sum(i * w for i, w in enumerate(weights)) / total if total else math.inf

    order = sorted(curves, key=lambda n: (centre(n), n))

    best: list[list[float]] = []
    came: list[list[int]] = []
    for i in range(length):
        now, floor = [costs[n][i] for n in order], floors[i]
        row: list[float] = []
        back: list[int] = []
        for k, t in enumerate(now):
            step = t / floor - 1 if math.isfinite(t) else math.inf
            if i == 0:
                row.append(step)
                back.append(k)
                continue
            options = [best[i - 1][j] + (SWITCH_COST if j != k else 0.0) for j in range(k + 1)]
            j = min(range(k + 1), key=options.__getitem__)
            row.append(options[j] + step)
            back.append(j)
        best.append(row)
        came.append(back)
    if not math.isfinite(min(best[-1])):
        # No unbroken ranges fit (a candidate failed in the middle): the baseline, or the fastest each time.
        if base is not None:
            return [BASELINE] * length
        return [min(order, key=lambda n, i=i: costs[n][i]) for i in range(length)]  # type: ignore[misc]
    k = min(range(len(order)), key=best[-1].__getitem__)
    picked = [order[k]]
    for i in range(length - 1, 0, -1):
        k = came[i][k]
        picked.append(order[k])
    return picked[::-1]
