"""Bytes that a schedule sends, as formulas, and the fewest that any schedule could send.

Everything is in multiples of the message size S (one rank's input). N ranks lie in islands of n_1, n_2, ...,
n_k ranks; n is the size of the rank's own island. Times follow from bytes as in LogGP: hops x latency + the
larger of egress / link bandwidth and boundary / uplink bandwidth.

What each schedule sends, from csrc/core/schedule.h:

- one_shot: each rank sends its input to all others: N - 1. Each of the n_a ranks of island a sends to each of
  the n_b of island b: n_a n_b over that boundary.
- two_shot: a rank owns 1/N of the tiles. It sends the rest of its input to the owners, (N - 1)/N, and its
  finished share to all others, (N - 1)/N. Over a -> b: n_a ranks send the n_b/N that b owns, and a's
  n_a/N of finished tiles go to n_b ranks: 2 n_a n_b / N.
- island_two_hop: (n - 1)/n to the owners in the island, then 1/n of partials to all N - 1 others. Over a -> b:
  the whole partial of a to each of n_b ranks: n_b.
- island_dataflow (and mailbox): (n - 1)/n in, 1/n of partials to one owner in each other island, (n - 1)/n
  of finished tiles: 2 (n - 1)/n + (k - 1)/n. Over a -> b: one partial: 1.
- island_ring: the same, but every partial but the own one's last stop travels on by the next island: each
  owner sends k - 1 partials, all to its neighbour: k - 1 over a -> a + 1, nothing elsewhere.
- with one island the island schedules are two_shot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes as multiples of the message.

    Attributes:
        egress: what a rank of each island sends.
        boundary: (island, island) -> what crosses in that direction.
    """

    egress: tuple[float, ...]
    boundary: dict[tuple[int, int], float]


def formula(schedule: str, sizes: Sequence[int]) -> Traffic:
    """What a schedule sends when partials travel in the dtype of the message.

    Args:
        schedule: a name in `sglang_sm120.comm.schedule.SCHEDULES`.
        sizes: ranks per island, islands ordered by their lowest rank.

    Raises:
        ValueError: an unknown schedule.
    """
    world = sum(sizes)
    islands = len(sizes)
    pairs = [(a, b) for a in range(islands) for b in range(islands) if a != b]
    if schedule == "one_shot":
        return Traffic(
            (world - 1.0,) * islands, {(a, b): float(sizes[a] * sizes[b]) for a, b in pairs}
        )
    if schedule == "two_shot" or islands == 1:
        return Traffic(
            (2 * (world - 1) / world,) * islands,
            {(a, b): 2 * sizes[a] * sizes[b] / world for a, b in pairs},
        )
    if schedule == "island_two_hop":
        return Traffic(
            tuple((n - 1) / n + (world - 1) / n for n in sizes),
            {(a, b): float(sizes[b]) for a, b in pairs},
        )
    if schedule in ("island_dataflow", "mailbox", "island_ring"):
        egress = tuple(2 * (n - 1) / n + (islands - 1) / n for n in sizes)
        if schedule != "island_ring":
            return Traffic(egress, dict.fromkeys(pairs, 1.0))
        return Traffic(
            egress,
            {(a, b): islands - 1.0 if b == (a + 1) % islands else 0.0 for a, b in pairs},
        )
    raise ValueError(f"no formula for schedule {schedule!r}")


def boundary_bound(sizes: Sequence[int]) -> float:
    """Fewest bytes from one island to another of two, as a multiple of the message.

    The result of b depends on the sum of a in every element, and a sum of a's inputs is as large as the
    message, so a -> b carries at least S. For more than two islands the cut argument gives S out of each
    island in all, which an exchange in one hop between islands cannot reach: each island then needs the
    partials of all others, so S per ordered pair, which is what this returns.
    """
    return 1.0 if len(sizes) > 1 else 0.0


def egress_bound(sizes: Sequence[int], size: int) -> float:
    """Fewest bytes a rank of an island of `size` ranks sends, when islands exchange one partial each way.

    Within a group of n ranks a reduce-scatter and a gather need 2 (n - 1)/n each (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009); the partials that leave
    the island, one for each other island, are shared by its n ranks.
    """
    return 2 * (size - 1) / size + (len(sizes) - 1) / size
