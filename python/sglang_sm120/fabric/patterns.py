"""Which ranks send to whom at once in the probe, from one pair to everything."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_sm120.fabric import islands as isl
from sglang_sm120.fabric.report import Flow


def to_run(
    partitions: Sequence[isl.Partition],
) -> list[tuple[str, isl.Partition, list[Flow]]]:
    """The patterns to run, gentlest first: round the islands, inside them, all lanes, everything at once."""
    world = sum(len(i) for i in partitions[0])
    if world < 2:
        return []
    everything = [(a, b) for a in range(world) for b in range(world) if a != b]
    split = [p for p in partitions if len(p) > 1]
    out: list[tuple[str, isl.Partition, list[Flow]]] = []
    out += [("ring", p, isl.onward(p)) for p in split]
    out += [("inside", p, isl.inside(p)) for p in split]
    out += [("lanes", p, isl.lanes(p)) for p in split]
    # Larger worlds cannot map all peers in one process, so no schedule of theirs sends everywhere.
    if world <= isl.MAX_PEERS + 1:
        out.append(("all-to-all", partitions[-1], everything))
    return out


def groups_of(name: str, partition: isl.Partition) -> list[isl.Partition]:
    """The groups of sources whose outgoing traffic is watched in a pattern: islands, or single GPUs.

    Traffic that crosses islands shares uplinks, so a single GPU's part of it says nothing; inside an island and on
    machines without islands every GPU has a port of its own.
    """
    single = tuple((r,) for island in partition for r in island)
    if name == "inside" or len(partition) == 1:
        return [single]
    return [partition]


def crowds(world: int) -> list[list[int]]:
    """All shifts at once, in portions of at most the eight peers that one process maps."""
    shifts = list(range(1, world))
    return [shifts[i : i + isl.MAX_PEERS] for i in range(0, len(shifts), isl.MAX_PEERS)]


def tournament(world: int) -> list[list[Flow]]:
    """Rounds of disjoint pairs so that every pair meets once (circle method)."""
    seats = list(range(world)) + ([-1] if world % 2 else [])
    half = len(seats) // 2
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(half)]
        rounds.append([(min(p), max(p)) for p in pairs if -1 not in p])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds
