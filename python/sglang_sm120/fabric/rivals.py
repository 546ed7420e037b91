"""Models of other implementations' schedules, for comparison and for checking the simulator against public tables.

These are the only schedules written in Python: what the plugin itself runs comes from `csrc/core`. Each function
returns a `Call`: the transfers of one collective plus the implementation's fixed times. The constants of
`Constants` were set on the fitting half of the published tables (see docs/simulator.md); the two that NCCL's own
source gives are marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from sglang_sm120.fabric.machine import Machine
from sglang_sm120.fabric.simulate_engine import Transfer

FLAG_BYTES = 16


class Constants(msgspec.Struct, frozen=True):
    """Software times of the rivals, in microseconds, and their rate limits, in GB/s.

    Attributes:
        ll_base_us, simple_base_us: fixed part of an NCCL ring all-reduce for the LL and Simple protocols; NCCL's own
            model for intra-node rings (src/graph/tuning.cc, baseLat of NCCL 2.30).
        ll_hop_us, simple_hop_us: software time per ring step, on top of the wire's latency.
        ll_gbps, simple_gbps: what the ring's channels move together per GPU (wire bytes).
        push_base_us: launch, load, sum and store of a one-hop push kernel inside a CUDA graph.
        barrier_us: fence, flag store and poll loop of a full-group barrier, on top of the wire's latency.
        pull_base_us: the same for a kernel that publishes its input and lets the others load it.
        phase_us: software time between two phases of a multi-phase kernel.
        norm_us: residual add and RMSNorm inside the same kernel.
    """

    ll_base_us: float = 6.6
    ll_hop_us: float = 0.29
    ll_gbps: float = 23.0
    simple_base_us: float = 8.4
    simple_hop_us: float = 2.55
    simple_gbps: float = 26.0
    push_base_us: float = 2.8
    barrier_us: float = 2.2
    pull_base_us: float = 1.05
    phase_us: float = 0.06
    norm_us: float = 2.2


CONSTANTS = Constants()


class Call(msgspec.Struct, frozen=True):
    """One collective ready to simulate.

    Attributes:
        transfers: in an order in which dependencies point backwards.
        fixed_us: launch, load and epilogue: time that no transfer shows.
        store_gbps, load_gbps: limits of the implementation on each GPU's own traffic; 0 keeps the machine's.
        label: the variant that was chosen, for tables.
    """

    transfers: tuple[Transfer, ...]
    fixed_us: float
    store_gbps: float = 0.0
    load_gbps: float = 0.0
    label: str = ""


Islands = Sequence[Sequence[int]]
Builder = Callable[[Machine, Sequence[int], int, Constants], Call]


def ring_order(machine: Machine, ranks: Sequence[int]) -> tuple[int, ...]:
    """Positions in `ranks`, ordered so that neighbours share a switch, then a root, then a socket, as NCCL orders."""

    def where(position: int) -> tuple[str, ...]:
        return tuple(reversed(machine.ancestors[machine.gpus[ranks[position]].id]))

    first = {where(i)[:depth]: i for depth in range(1, 9) for i in reversed(range(len(ranks)))}
    keys = {
        i: tuple(first[where(i)[:depth]] for depth in range(1, len(where(i)) + 1))
        for i in range(len(ranks))
    }
    return tuple(sorted(range(len(ranks)), key=lambda i: (keys[i], i)))


def nccl_ring(
    machine: Machine,
    ranks: Sequence[int],
    nbytes: int,
    constants: Constants = CONSTANTS,
    protocol: str = "LL",
) -> Call:
    """NCCL's ring all-reduce: world - 1 reduce-scatter steps, then world - 1 gather steps, each forwarding 1/world.

    Protocol "LL" puts 8 bytes of flag beside 8 bytes of data, so it moves twice the bytes; "Simple" moves the
    data alone but synchronises more slowly. Pieces of a step flow on before the step is complete.
    """
    if protocol not in ("LL", "Simple"):
        raise ValueError(f"NCCL protocol {protocol!r}: LL and Simple are modelled")
    low_latency = protocol == "LL"
    order = ring_order(machine, ranks)
    world = len(order)
    hop_us = constants.ll_hop_us if low_latency else constants.simple_hop_us
    chunk = -(-nbytes // world) * (2 if low_latency else 1)
    pieces = max(1, min(4, chunk // 8192))
    transfers: list[Transfer] = []
    last: dict[tuple[int, int], int] = {}
    for step in range(2 * (world - 1)):
        for piece in range(pieces):
            new: dict[tuple[int, int], int] = {}
            for at in range(world):
                before = last.get(((at - 1) % world, piece))
                new[(at, piece)] = len(transfers)
                transfers.append(
                    Transfer(
                        hop=step,
                        source=order[at],
                        target=order[(at + 1) % world],
                        nbytes=-(-chunk // pieces),
                        after=() if before is None else (before,),
                        delay_us=hop_us,
                    )
                )
            last.update(new)
    return Call(
        transfers=tuple(transfers),
        fixed_us=constants.ll_base_us if low_latency else constants.simple_base_us,
        store_gbps=constants.ll_gbps if low_latency else constants.simple_gbps,
        label=protocol,
    )


def one_shot_push(
    machine: Machine,
    ranks: Sequence[int],
    nbytes: int,
    constants: Constants = CONSTANTS,
    barrier: bool = False,
) -> Call:
    """Every rank stores its whole input to every other rank, then sums what it received.

    With `barrier` the arrival is announced by a flag after the data (fence, flag, poll); without, the data
    carries its own validity (Lamport style).
    """
    transfers: list[Transfer] = []
    for source, target in _pairs(range(len(ranks))):
        transfers.append(Transfer(0, source, target, nbytes))
    if barrier:
        _flags(
            transfers, range(len(ranks)), hop=1, delay_us=constants.barrier_us, data=transfers[:]
        )
    return Call(transfers=tuple(transfers), fixed_us=constants.push_base_us)


def one_shot_pull(
    machine: Machine,
    ranks: Sequence[int],
    nbytes: int,
    constants: Constants = CONSTANTS,
    fused: bool = False,
) -> Call:
    """Every rank publishes its input in its own memory, meets the others at a barrier, and loads their inputs.

    `fused` adds the residual and RMSNorm epilogue.
    """
    transfers: list[Transfer] = []
    arrived = _flags(transfers, range(len(ranks)), hop=0, delay_us=constants.barrier_us)
    for source, target in _pairs(range(len(ranks))):
        transfers.append(Transfer(1, source, target, nbytes, arrived[source], "load"))
    return Call(
        transfers=tuple(transfers),
        fixed_us=constants.pull_base_us + (constants.norm_us if fused else 0.0),
    )


def staged_push(
    machine: Machine,
    ranks: Sequence[int],
    nbytes: int,
    constants: Constants = CONSTANTS,
) -> Call:
    """FlashInfer's PCIe all-reduce: one outbound stream at a time, reduce-scatter and gather inside an island.

    World 2 is a plain push. Two or more equal islands exchange partial sums between partners in the middle.
    """
    world = len(ranks)
    if world == 2:
        return one_shot_push(machine, ranks, nbytes, constants)
    islands = islands_of(machine, ranks)
    if len({len(i) for i in islands}) > 1 or len(islands[0]) == 1:
        islands = (tuple(range(world)),)
    size = len(islands[0])
    share = -(-nbytes // size)
    transfers: list[Transfer] = []
    ready = _staged(transfers, islands, share, 0, 0.0, {})
    if len(islands) > 1:
        crossed: dict[int, list[int]] = {rank: [] for rank in range(world)}
        for a, island in enumerate(islands):
            for lane, source in enumerate(island):
                for step in range(1, len(islands)):
                    target = islands[(a + step) % len(islands)][lane]
                    crossed[target].append(len(transfers))
                    transfers.append(
                        Transfer(
                            1, source, target, share, ready[source], delay_us=constants.phase_us
                        )
                    )
        ready = {rank: tuple(got) for rank, got in crossed.items()}
    _staged(transfers, islands, share, 2, constants.phase_us, ready)
    return Call(transfers=tuple(transfers), fixed_us=constants.push_base_us)


def _staged(
    transfers: list[Transfer],
    islands: Islands,
    share: int,
    hop: int,
    delay_us: float,
    ready: dict[int, tuple[int, ...]],
) -> dict[int, tuple[int, ...]]:
    """Append an all-to-all inside each island, one target after the other; return what each rank received."""
    got: dict[int, list[int]] = {rank: [] for island in islands for rank in island}
    for island in islands:
        previous: dict[int, int] = {}
        for stage in range(1, len(island)):
            for at, source in enumerate(island):
                target = island[(at + stage) % len(island)]
                after = ready.get(source, ()) if stage == 1 else (previous[source],)
                previous[source] = len(transfers)
                got[target].append(len(transfers))
                transfers.append(
                    Transfer(
                        hop, source, target, share, after, delay_us=delay_us if stage == 1 else 0.0
                    )
                )
    return {rank: tuple(ids) for rank, ids in got.items()}


def island_pull(
    machine: Machine,
    ranks: Sequence[int],
    nbytes: int,
    constants: Constants = CONSTANTS,
) -> Call:
    """b12x's island reduce-scatter: pull a share inside the island, from the same lane elsewhere, then gather.

    A barrier stands before each of the three phases.
    """
    islands = islands_of(machine, ranks)
    size = min(len(i) for i in islands)
    share = -(-nbytes // size)
    transfers: list[Transfer] = []
    ready: dict[int, tuple[int, ...]] = {}
    lanes = [tuple(island[k] for island in islands) for k in range(size)]
    for hop, groups in enumerate((islands, lanes, islands)):
        loaded: dict[int, tuple[int, ...]] = {}
        for group in groups:
            arrived = _flags(
                transfers, group, hop=2 * hop, delay_us=constants.barrier_us, ready=ready
            )
            for source in group:
                mine = []
                for target in group:
                    if source != target:
                        mine.append(len(transfers))
                        transfers.append(
                            Transfer(2 * hop + 1, source, target, share, arrived[source], "load")
                        )
                loaded[source] = tuple(mine)
        ready = loaded
    return Call(
        transfers=tuple(transfers), fixed_us=constants.pull_base_us + 2 * constants.phase_us
    )


def leader_pull(
    machine: Machine,
    ranks: Sequence[int],
    nbytes: int,
    constants: Constants = CONSTANTS,
) -> Call:
    """b12x's hierarchical runtime: each island's leader loads all inputs, leaders load each other, the rest load."""
    islands = islands_of(machine, ranks)
    leaders = tuple(island[0] for island in islands)
    transfers: list[Transfer] = []
    ready: dict[int, tuple[int, ...]] = {}
    for hop, groups in enumerate((islands, (leaders,), islands)):
        loaded: dict[int, tuple[int, ...]] = {}
        for group in groups:
            arrived = _flags(
                transfers, group, hop=2 * hop, delay_us=constants.barrier_us, ready=ready
            )
            for source in group:
                leads = source in leaders
                wanted = {
                    0: [t for t in group if t != source] if leads else [],
                    1: [t for t in group if t != source],
                    2: [] if leads else [group[0]],
                }[hop]
                mine = []
                for target in wanted:
                    mine.append(len(transfers))
                    transfers.append(
                        Transfer(2 * hop + 1, source, target, nbytes, arrived[source], "load")
                    )
                loaded[source] = tuple(mine) or arrived[source]
        ready = {**ready, **loaded}
    return Call(
        transfers=tuple(transfers), fixed_us=constants.pull_base_us + 2 * constants.phase_us
    )


def islands_of(machine: Machine, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The machine's islands restricted to `ranks`, as positions in `ranks`."""
    position = {rank: i for i, rank in enumerate(ranks)}
    groups = (tuple(position[r] for r in g if r in position) for g in machine.islands())
    return tuple(g for g in groups if g)


def _pairs(group: Sequence[int]) -> list[tuple[int, int]]:
    """Ordered pairs, each source's targets rotated so that no target is everybody's first."""
    members = list(group)
    return [
        (source, members[(at + step) % len(members)])
        for step in range(1, len(members))
        for at, source in enumerate(members)
    ]


def _flags(
    transfers: list[Transfer],
    group: Sequence[int],
    hop: int,
    delay_us: float,
    data: Sequence[Transfer] = (),
    ready: dict[int, tuple[int, ...]] | None = None,
) -> dict[int, tuple[int, ...]]:
    """Append a full-group barrier; return per rank the flags it waits for.

    A flag follows the sender's own `data` to the same target, or whatever the sender has `ready`.
    """
    sent = {(t.source, t.target): i for i, t in enumerate(data)}
    got: dict[int, list[int]] = {rank: [] for rank in group}
    for source, target in _pairs(group):
        after = (ready or {}).get(source, ())
        if (source, target) in sent:
            after = (sent[(source, target)],)
        got[target].append(len(transfers))
        transfers.append(Transfer(hop, source, target, FLAG_BYTES, after, delay_us=delay_us))
    return {rank: tuple(ids) for rank, ids in got.items()}


RIVALS: dict[str, Builder] = {
    "nccl-ll": nccl_ring,
    "nccl-simple": lambda m, r, n, c: nccl_ring(m, r, n, c, "Simple"),
    "one-shot-push": one_shot_push,
    "one-shot-push-barrier": lambda m, r, n, c: one_shot_push(m, r, n, c, barrier=True),
    "one-shot-pull": one_shot_pull,
    "one-shot-pull-fused": lambda m, r, n, c: one_shot_pull(m, r, n, c, fused=True),
    "staged-push": staged_push,
    "island-pull": island_pull,
    "leader-pull": leader_pull,
}
