"""Islands from measurements: which ranks are close to each other."""

from __future__ import annotations

from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]
Partition = tuple[tuple[int, ...], ...]

MAX_PEERS = 8  # a CUDA device maps at most eight peers
# Two groups of latencies are told apart when the gap between them is at least this ratio: same switch
# against same socket is 1.5 and more, port spread inside one switch at most 1.15.
GAP = 1.18


def flat(world: int) -> Partition:
    """All ranks in one island."""
    return (tuple(range(world)),)


def partitions(latency_us: Matrix) -> tuple[Partition, ...]:
    """Ways to group the ranks that the latency matrix supports, coarsest first; the first is `flat`.

    Single-linkage clustering at every gap of the sorted latencies (the worse direction of each pair counts). A
    partition is kept only when it is clean: every latency inside an island is below every latency between islands.
    """
    world = len(latency_us)
    pairs = [(a, b) for a in range(world) for b in range(a)]
    far = {(a, b): max(latency_us[a][b], latency_us[b][a]) for a, b in pairs}
    levels = sorted(far.values())
    found: list[Partition] = [flat(world)]
    for low, high in zip(levels[-2::-1], levels[:0:-1], strict=True):
        if low <= 0 or high / low < GAP:
            continue
        joined = _components(world, [p for p, us in far.items() if us <= low])
        inside = {p for p in pairs if any(p[0] in i and p[1] in i for i in joined)}
        clean = all(far[p] <= low for p in inside)
        if clean and 1 < len(joined) < world and joined not in found:
            found.append(joined)
    return tuple(found)


def with_hints(found: Sequence[Partition], hints: Sequence[Partition]) -> tuple[Partition, ...]:
    """`found` and the hints that name every rank once, without repeats, ordered by number of islands."""
    everyone = sorted(r for island in found[0] for r in island)
    out = list(found)
    for hint in hints:
        ordered = tuple(sorted(tuple(sorted(island)) for island in hint))
        if sorted(r for island in ordered for r in island) == everyone and ordered not in out:
            out.append(ordered)
    return tuple(sorted(out, key=len))


def _components(world: int, joined: Sequence[tuple[int, int]]) -> Partition:
    label = list(range(world))
    for a, b in joined:
        old, new = label[a], label[b]
        label = [new if x == old else x for x in label]
    groups: dict[int, list[int]] = {}
    for rank in range(world):
        groups.setdefault(label[rank], []).append(rank)
    return tuple(tuple(g) for g in groups.values())


def peers(partition: Partition, rank: int) -> set[int]:
    """The ranks that an island schedule makes `rank` write to: its island, and its partners in the others.

    Islands of unequal size have several partners per lane, because tile owners differ: owner t of island I is
    member t mod |I|.
    """
    home = next(i for i in partition if rank in i)
    lane = home.index(rank)
    out = set(home)
    for other in partition:
        if other is home:
            continue
        # Owners meet for every tile t with t mod |home| == lane; their lanes in the other island repeat.
        out.update(other[t % len(other)] for t in range(lane, len(home) * len(other), len(home)))
    return out - {rank}


def fits(partition: Partition) -> bool:
    """Whether every rank's peers can be mapped by one CUDA process."""
    return all(len(peers(partition, rank)) <= MAX_PEERS for i in partition for rank in i)


def text(partition: Partition) -> str:
    """The spelling of `--sm120-islands`: "0,1,2,3;4,5,6,7"."""
    return ";".join(",".join(map(str, island)) for island in partition)


def lanes(partition: Partition) -> list[tuple[int, int]]:
    """Flows of the exchange between islands: each owner to its partners."""
    flows = []
    for island in partition:
        for rank in island:
            flows += [(rank, p) for p in sorted(peers(partition, rank)) if p not in island]
    return flows


def onward(partition: Partition) -> list[tuple[int, int]]:
    """Flows of a ring round the islands: each owner to its partners in the next island only."""
    flows = []
    for island, following in zip(partition, partition[1:] + partition[:1], strict=True):
        for rank in island:
            flows += [(rank, p) for p in sorted(peers(partition, rank)) if p in following]
    return flows


def inside(partition: Partition) -> list[tuple[int, int]]:
    """Flows of all-to-all inside every island at once."""
    return [(a, b) for island in partition for a in island for b in island if a != b]
