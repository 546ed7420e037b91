"""How fast each rank's processor ran, from operators that only a processor works on.

A rank whose core is shared with other work is late in every sum, and the others wait for it there. Its kernels and its
number of calls look like those of any other rank; the length of operators that touch no GPU does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Change a tensor's shape or flags and nothing else: no memory, no kernel, no lock.
CHEAP = ("aten::view", "aten::as_strided", "aten::slice", "aten::select", "aten::resolve_neg")
# Fewer than this many of one operator tell nothing.
ENOUGH = 20
# How many times as slow as the fastest rank is worth a word; ranks of one healthy machine were within 1.15.
SLOW = 1.3

Paces = Mapping[str, float]  # operator -> median microseconds


@dataclass(frozen=True)
class Slow:
    """A rank whose processor was slow.

    Attributes:
        times: how many times as slow as the fastest rank, median over operators.
        operator, us, fastest_us: the operator whose ratio is nearest to that, with both ranks' medians.
    """

    rank: int
    fastest: int
    times: float
    operator: str
    us: float
    fastest_us: float

    def sentence(self) -> str:
        return (
            f"Rank {self.rank}'s processor was {self.times:.1f} times as slow as rank {self.fastest}'s in operators that "
            f"touch no GPU ({self.operator} {self.us:.2f} against {self.fastest_us:.2f} us): look for other work on its "
            "core or the sibling thread, a lower clock, or a busy neighbour of this virtual machine."
        )


def paces(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Median microseconds per cheap operator of a trace's events."""
    found: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"] in CHEAP:
            found.setdefault(event["name"], []).append(float(event["dur"]))
    return {name: statistics.median(us) for name, us in found.items() if len(us) >= ENOUGH}


def common_operators(ranks: Iterable[Paces]) -> list[str]:
    """Cheap operators that every rank's trace has."""
    known = list(ranks)
    return [op for op in CHEAP if known and all(p.get(op, 0) > 0 for p in known)]


def times_as_slow(ranks: Sequence[Paces], operators: Sequence[str]) -> list[float]:
    """Per rank its pace over the best of all ranks, median over operators."""
    best = {op: min(p[op] for p in ranks) for op in operators}
    return [statistics.median(p[op] / best[op] for op in operators) for p in ranks]


def slow_ranks(ranks: Mapping[int, Paces]) -> list[Slow]:
    """Ranks at least `SLOW` times as slow as the fastest one, slowest first; none where traces have no operators."""
    common = common_operators(ranks.values())
    if len(ranks) < 2 or not common:
        return []
    relative = dict(zip(ranks, times_as_slow(list(ranks.values()), common), strict=True))
    fastest = min(ranks, key=lambda r: relative[r])
    found = []
    for rank, pace in ranks.items():
        ratios = {op: pace[op] / ranks[fastest][op] for op in common}
        factor = statistics.median(ratios.values())
        if factor >= SLOW:
            op = min(common, key=lambda o: abs(ratios[o] - factor))
            found.append(Slow(rank, fastest, factor, op, pace[op], ranks[fastest][op]))
    return sorted(found, key=lambda s: -s.times)
