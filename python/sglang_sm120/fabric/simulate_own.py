"""The plugin's own schedules on a described machine, from the same data that drives production (`comm.schedule`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from sglang_sm120.comm.schedule import CUDA_PEER_LIMIT, SCHEDULES, Move, describe, moves
from sglang_sm120.fabric.machine import Machine
from sglang_sm120.fabric.rivals import Call
from sglang_sm120.fabric.simulate_engine import Transfer


class Costs(msgspec.Struct, frozen=True):
    """Software times of our kernels in microseconds, and what they may store per GPU (GB/s, 0: the machine's figure).

    Attributes:
        fixed_us: launch inside a CUDA graph, input load and output store.
        hop_us: from the arrival of a tile to the next store: poll, sum, encode.
        epilogue_us: residual add and RMSNorm on top of a plain sum.
        pieces: groups of tiles that move through the hops independently (CTAs work tile by tile).
    """

    fixed_us: float = 2.3
    hop_us: float = 0.4
    epilogue_us: float = 0.9
    pieces: int = 4
    store_gbps: float = 0.0


COSTS = Costs()


def transfers_of(stores: Iterable[Move], tiles: int, costs: Costs = COSTS) -> tuple[Transfer, ...]:
    """Group per-tile stores into transfers that depend on each other as their tiles do.

    Tiles are cut into `costs.pieces` runs; the stores of one run between two ranks in one hop are one transfer. It
    waits for every transfer of an earlier hop that brought one of its tiles to its source.
    """
    pieces = max(1, min(costs.pieces, tiles))
    nbytes: dict[tuple[int, int, int, int], int] = {}
    members: dict[tuple[int, int, int, int], set[int]] = {}
    for m in stores:
        key = (m.hop, m.tile * pieces // tiles, m.source, m.target)
        nbytes[key] = nbytes.get(key, 0) + m.bytes
        members.setdefault(key, set()).add(m.tile)
    out: list[Transfer] = []
    brought: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (rank, tile) -> [(hop, transfer)]
    for key in sorted(nbytes, key=lambda k: (k[0], k[1], (k[3] - k[2]) % 64, k[2])):
        hop, _, source, target = key
        after = sorted(
            {
                i
                for tile in members[key]
                for earlier, i in brought.get((source, tile), ())
                if earlier < hop
            }
        )
        for tile in members[key]:
            brought.setdefault((target, tile), []).append((hop, len(out)))
        out.append(
            Transfer(
                hop,
                source,
                target,
                nbytes[key],
                tuple(after),
                delay_us=costs.hop_us if after else 0.0,
            )
        )
    return tuple(out)


# Owners repeat with a period far below this, so larger messages are this many tiles with more bytes each.
TILES = 128


def build(
    schedule: str,
    islands: Sequence[Sequence[int]],
    rows: int,
    hidden: int,
    costs: Costs = COSTS,
    *,
    fused: bool = True,
) -> Call:
    """A call of one of the plugin's schedules on [rows, hidden] bf16, ready to simulate.

    Args:
        islands: partition of the ranks 0 .. world - 1.
        fused: with the residual and RMSNorm epilogue.
    """
    partition = tuple(tuple(i) for i in islands)
    per_row = -(-hidden // 256)
    fewer = max(1, min(rows, TILES // per_row))
    transfers = _transfers(schedule, partition, fewer, hidden, costs)
    if fewer < rows:
        transfers = tuple(t._replace(nbytes=t.nbytes * rows // fewer) for t in transfers)
    return Call(
        transfers=transfers,
        # The last hop's poll and sum have no store after them.
        fixed_us=costs.fixed_us + costs.hop_us + (costs.epilogue_us if fused else 0.0),
        store_gbps=costs.store_gbps,
        label=";".join(",".join(map(str, i)) for i in partition) if len(partition) > 1 else "",
    )


@lru_cache(maxsize=512)
def _transfers(
    schedule: str, islands: tuple[tuple[int, ...], ...], rows: int, hidden: int, costs: Costs
) -> tuple[Transfer, ...]:
    world = sum(len(i) for i in islands)
    stores = moves(schedule, world=world, rows=rows, hidden=hidden, islands=islands)
    return transfers_of(stores, -(-hidden // 256) * rows, costs)


def partitions(machine: Machine, ranks: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Partitions into islands worth trying: by switch (the machine's), by root port, by socket; none twice."""
    keys = (
        lambda g: machine.switch_of(g) or machine.socket_of(g),
        machine.root_of,
        machine.socket_of,
    )
    out: list[tuple[tuple[int, ...], ...]] = []
    for key in keys:
        groups: dict[str, list[int]] = {}
        for position, rank in enumerate(ranks):
            groups.setdefault(key(machine.gpus[rank].id), []).append(position)
        partition = tuple(tuple(g) for g in groups.values())
        if partition not in out and not 1 < len(partition) == len(ranks):
            out.append(partition)
    return tuple(out) or ((tuple(range(len(ranks))),),)


def names() -> tuple[str, ...]:
    """Names of the plugin's schedules."""
    return SCHEDULES


def refusal(
    machine: Machine, schedule: str, ranks: Sequence[int], islands: Sequence[Sequence[int]]
) -> str:
    """Why `schedule` with these islands cannot serve these GPUs, or "" when it can."""
    if schedule not in SCHEDULES:
        return f"no such schedule: {', '.join(SCHEDULES)}"
    if len(ranks) < 2:
        return "one rank has nobody to sum with"
    if schedule == "mailbox":
        return ""
    ids = [machine.gpus[r].id for r in ranks]
    for a in ids:
        for b in ids:
            if a != b and not machine.p2p(a, b):
                return f"no peer access between {a} and {b}"
            for fault in machine.faults:
                if a != b and fault.hits(a, b, 1 << 62, "store"):
                    return f"the probe rejects stores from {a} to {b}: {fault.kind}"
    if schedule.startswith("island") and len(islands) == 1:
        return "one island: the same as two_shot"
    peers = _peers(schedule, len(ranks), tuple(tuple(i) for i in islands))
    if peers > CUDA_PEER_LIMIT:
        return f"a rank would store to {peers} peers, CUDA maps {CUDA_PEER_LIMIT}"
    return ""


@lru_cache(maxsize=256)
def _peers(schedule: str, world: int, islands: tuple[tuple[int, ...], ...]) -> int:
    return describe(schedule, world=world, rows=1, hidden=256, islands=islands).peers


def mailbox_machine(machine: Machine) -> Machine:
    """The machine as mailboxes use it: every store goes up to host memory and is polled from there.

    A hop costs the mailbox's latency whatever the tree; bandwidth is that of the links to the root ports.
    """
    links = {
        name: msgspec.structs.replace(link, latency_us=0.0) for name, link in machine.links.items()
    }
    gpus = []
    for gpu in machine.gpus:
        name = f"{gpu.id} to mailbox"
        links[name] = msgspec.structs.replace(
            machine.links[gpu.link], latency_us=machine.host.mailbox_latency_us / 2
        )
        gpus.append(msgspec.structs.replace(gpu, link=name))
    return msgspec.structs.replace(
        machine,
        links=links,
        gpus=tuple(gpus),
        switches=tuple(msgspec.structs.replace(s, acs=True) for s in machine.switches),
        no_p2p=(),
        faults=(),
    )
