"""Schedules as data: who sends which tile to whom in which hop, as `csrc/core/schedule.h` decides it.

`describe(...)` returns every hop of a call with its bytes; `moves(...)` returns every single store. Printing,
pictures, the fabric simulator and the byte-count tests read them, and the engines run the same functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_sm120.comm._lib import host_library

SCHEDULES = (
    "one_shot",
    "two_shot",
    "island_two_hop",
    "island_dataflow",
    "island_ring",
    "mailbox",
)
REGIONS = ("reduce", "cross", "gather")
_DTYPES = {"fp32": 0, "bf16": 1, "fp16": 2}
_INT8 = 3
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# A CUDA device maps at most 8 peers, so a larger world needs a schedule with fewer partners per rank.
CUDA_PEER_LIMIT = 8


def islands_text(islands: str | Sequence[Sequence[int]] | None) -> str:
    """Write a partition as the engine reads it: "0,1;2,3"; None is the empty text, one island."""
    if islands is None:
        return ""
    if isinstance(islands, str):
        return islands.replace(" ", "")
    return ";".join(",".join(str(rank) for rank in island) for island in islands)


@dataclass(frozen=True)
class Flow:
    """Stores of one hop from one rank to another.

    Attributes:
        hop: 0 needs only the rank's own input; hop h needs what hop h - 1 brought.
        region: where it lands: "reduce" (raw contributions), "cross" (island partials), "gather" (sums).
        source: sending rank.
        target: receiving rank.
        bytes: tile bytes on the wire, without the 16-byte call record per edge and call.
        tiles: number of stores.
    """

    hop: int
    region: str
    source: int
    target: int
    bytes: int
    tiles: int


@dataclass(frozen=True)
class Move:
    """One store of one tile; fields as in `Flow`."""

    hop: int
    region: str
    source: int
    target: int
    tile: int
    bytes: int


@dataclass(frozen=True)
class Description:
    """One call of one schedule, written out.

    Attributes:
        schedule: a name in `SCHEDULES`.
        island_of: island index of each rank; islands are ordered by their lowest rank.
        message_bytes: rows x hidden x bytes of the dtype.
        hops: longest chain of dependent stores.
        peers: most ranks that any one rank stores to.
        flows: every flow, ordered by hop, region, source, target.
        through_host: the slabs lie in host memory (mailbox): each flow is a write by its source and a read
            by its target, both to the host, and no traffic passes between two devices.
    """

    schedule: str
    island_of: tuple[int, ...]
    message_bytes: int
    hops: int
    peers: int
    flows: tuple[Flow, ...]
    through_host: bool

    @property
    def world(self) -> int:
        return len(self.island_of)

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each island."""
        return tuple(
            tuple(r for r, island in enumerate(self.island_of) if island == i)
            for i in range(max(self.island_of) + 1)
        )

    @property
    def edges(self) -> dict[tuple[int, int], int]:
        """Bytes over each edge (source, target)."""
        total: dict[tuple[int, int], int] = defaultdict(int)
        for flow in self.flows:
            total[flow.source, flow.target] += flow.bytes
        return dict(total)

    @property
    def boundaries(self) -> dict[tuple[int, int], int]:
        """Bytes from one island to another, (island, island) -> bytes; zero for pairs that never talk."""
        count = max(self.island_of) + 1
        total = {(a, b): 0 for a in range(count) for b in range(count) if a != b}
        for (source, target), size in self.edges.items():
            pair = (self.island_of[source], self.island_of[target])
            if pair[0] != pair[1]:
                total[pair] += size
        return total

    @property
    def egress(self) -> tuple[int, ...]:
        """Bytes each rank sends."""
        return tuple(
            sum(f.bytes for f in self.flows if f.source == rank) for rank in range(self.world)
        )

    @property
    def ingress(self) -> tuple[int, ...]:
        """Bytes each rank receives."""
        return tuple(
            sum(f.bytes for f in self.flows if f.target == rank) for rank in range(self.world)
        )


def _arguments(
    schedule: str,
    world: int,
    rows: int,
    hidden: int,
    islands: str | Sequence[Sequence[int]] | None,
    dtype: str,
    wire: str,
    fp32_partials: bool,
) -> tuple[int, str, int, int, int, int, int, int]:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    if wire not in ("lossless", "int8"):
        raise ValueError(f"wire {wire!r} is not lossless or int8")
    codec = _INT8 if wire == "int8" else _DTYPES[dtype]
    partial = _DTYPES["fp32"] if fp32_partials else codec
    index = SCHEDULES.index(schedule)
    return world, islands_text(islands), index, rows, hidden, _DTYPES[dtype], codec, partial


def describe(
    schedule: str,
    *,
    world: int,
    rows: int,
    hidden: int,
    islands: str | Sequence[Sequence[int]] | None = None,
    dtype: str = "bf16",
    wire: str = "lossless",
    fp32_partials: bool = False,
) -> Description:
    """Write out one call of a schedule.

    Args:
        schedule: a name in `SCHEDULES`.
        world: ranks, 1 to 16.
        rows: rows of the message.
        hidden: elements per row, a multiple of 8.
        islands: partition of the ranks ("0-3;4-7", or lists); None is one island.
        dtype: "bf16", "fp16" or "fp32".
        wire: "lossless" or "int8".
        fp32_partials: island partials travel as fp32.

    Raises:
        ValueError: an argument is outside what the engine supports.
    """
    arguments = _arguments(schedule, world, rows, hidden, islands, dtype, wire, fp32_partials)
    library = host_library()
    facts = list(library.schedule_facts(*arguments[:3]))
    raw = list(library.schedule_flows(*arguments))
    flows = tuple(
        Flow(hop, REGIONS[region], source, target, size, tiles)
        for hop, region, source, target, size, tiles in zip(*[iter(raw)] * 6)
    )
    return Description(
        schedule=schedule,
        island_of=tuple(facts[3:]),
        message_bytes=rows * hidden * _ELEMENT_BYTES[dtype],
        hops=facts[0],
        peers=facts[1],
        flows=flows,
        through_host=schedule == "mailbox",
    )


def moves(
    schedule: str,
    *,
    world: int,
    rows: int,
    hidden: int,
    islands: str | Sequence[Sequence[int]] | None = None,
    dtype: str = "bf16",
    wire: str = "lossless",
    fp32_partials: bool = False,
) -> list[Move]:
    """Every store of one call, tile by tile; arguments and errors as for `describe`."""
    arguments = _arguments(schedule, world, rows, hidden, islands, dtype, wire, fp32_partials)
    raw = list(host_library().schedule_moves(*arguments))
    return [
        Move(hop, REGIONS[region], source, target, tile, size)
        for hop, region, source, target, tile, size in zip(*[iter(raw)] * 6)
    ]


@dataclass(frozen=True)
class SlabLayout:
    """Sizes in bytes of a rank's slab; see `make_layout` in csrc/core/layout.h for the formula.

    slab = control + slots x (reduce + cross + gather)
    """

    slab: int
    control: int
    slots: int
    slot: int
    reduce: int
    cross: int
    gather: int


def slab_layout(
    *,
    world: int,
    capacity: int,
    small: int,
    islands: str | Sequence[Sequence[int]] | None = None,
) -> SlabLayout:
    """Size of a slab.

    Args:
        world: ranks.
        capacity: bytes of the largest message.
        small: bytes of the largest one-shot or island two-hop message.
        islands: partition of the ranks.
    """
    return SlabLayout(*host_library().slab_layout(world, islands_text(islands), capacity, small))
