"""Time of a schedule from measured constants: fixed cost + hops x latency + bytes over the slowest shared part.

The byte and hop counts are those of `csrc/core/schedule.h`; NCCL's constants are its own (src/graph/tuning.cc).
These are projections: they order candidates before anything is timed, and serve alone only where nothing can be.
"""

from __future__ import annotations

import math
import statistics

import msgspec

from sglang_sm120.fabric.islands import Partition, fits
from sglang_sm120.fabric.report import PatternResult, ProbeReport

FIXED_US = 3.0  # launch inside a graph, reading the input, writing the output
# NCCL on PCIe: base and per-hop microseconds of LL and Simple (baseLat and hwLat of src/graph/tuning.cc, 2.30.7).
NCCL_LL = (6.6, 1.0)
NCCL_SIMPLE = (8.4, 5.7)
LL_WIRE = 2.0  # LL sends 4 bytes of flag with 4 bytes of data
SCHEDULES = ("one_shot", "two_shot", "island_two_hop", "island_dataflow", "island_ring")


class Constants(msgspec.Struct, frozen=True):
    """What a partition of a measured machine offers.

    Attributes:
        near_us, far_us: one-way latency inside an island and between islands (equal when there is one island).
        port_gbps: what one GPU sends, the same to each of its peers, when its whole island sends.
        leaving_gbps: what leaves one island, the same on each lane, when all lanes send; 0 with one island.
    """

    near_us: float
    far_us: float
    port_gbps: float
    leaving_gbps: float


def constants(report: ProbeReport, islands: Partition) -> Constants:
    """The constants of a partition, from the probe's report."""
    home = {rank: i for i, island in enumerate(islands) for rank in island}
    near: list[float] = []
    far: list[float] = []
    solo: list[float] = []
    for a in range(report.world):
        for b in range(report.world):
            if a != b:
                (near if home[a] == home[b] else far).append(report.latency_us[a][b])
                solo.append(report.store_gbps[a][b])
    near = near or far
    together = report.pattern("all-to-all" if len(islands) == 1 else "inside", islands)
    port = _even_rate(together) if together is not None else statistics.median(solo)
    lanes = report.pattern("lanes", islands)
    leaving = 0.0
    if lanes is not None:
        leaving = min(lanes.gbps) * len(lanes.flows) / len(islands)
    elif far:
        leaving = min(report.store_gbps[a][b] for a in home for b in home if home[a] != home[b])
    far_us = statistics.median(far) if far else statistics.median(near)
    return Constants(statistics.median(near), far_us, port, leaving)


def _even_rate(pattern: PatternResult) -> float:
    """GB/s of one GPU when every flow carries the same bytes: the slowest flow ends last and sets the time."""
    sources = len({a for a, _ in pattern.flows})
    return min(pattern.gbps) * len(pattern.flows) / sources


def schedule_us(schedule: str, nbytes: int, islands: Partition, c: Constants) -> float:
    """Microseconds of one call of `nbytes` per rank; inf where the schedule does not fit the partition.

    Args:
        schedule: one of `SCHEDULES`.
    """
    world = sum(len(i) for i in islands)
    m, count = max(len(i) for i in islands), len(islands)
    if world == 1:
        return FIXED_US
    flat = schedule in ("one_shot", "two_shot", "island_two_hop")
    if (flat and world > 9) or not fits(islands):
        return float("inf")  # a CUDA process maps eight peers
    if schedule in ("island_two_hop", "island_dataflow", "island_ring") and count == 1:
        return float("inf")  # the same as two-shot there
    away = world - m
    hops, sent, crossing = {
        "one_shot": (c.far_us, float(world - 1), float(m * away)),
        "two_shot": (2 * c.far_us, 2 * (world - 1) / world, 2 * m * away / world),
        "island_two_hop": (c.near_us + c.far_us, (m - 1) / m + (world - 1) / m, float(away)),
        "island_dataflow": (
            2 * c.near_us + c.far_us,
            (2 * (m - 1) + count - 1) / m,
            float(count - 1),
        ),
        "island_ring": (
            2 * c.near_us + (count - 1) * c.far_us,
            (2 * (m - 1) + count - 1) / m,
            float(count - 1),
        ),
    }[schedule]
    wire = sent * nbytes / c.port_gbps
    if count > 1 and c.leaving_gbps > 0:
        wire = max(wire, crossing * nbytes / c.leaving_gbps)
    return FIXED_US + hops + wire / 1e3


def fitting(islands: Partition) -> list[str]:
    """The schedules that can run on a partition, in the order of `SCHEDULES`."""
    reach = Constants(1.0, 1.0, 1.0, 1.0)
    return [s for s in SCHEDULES if math.isfinite(schedule_us(s, 1, islands, reach))]


def nccl_us(nbytes: int, islands: Partition, c: Constants) -> float:
    """Microseconds of NCCL's ring all-reduce by its own cost model, with the measured bandwidth of the ring.

    Every GPU sends to one next GPU; the ring crosses each island's boundary once, so it gets a single flow there.
    """
    world = sum(len(i) for i in islands)
    if world == 1:
        return FIXED_US
    hops = 2 * (world - 1)
    gbps = min(c.port_gbps, c.leaving_gbps) if len(islands) > 1 and c.leaving_gbps else c.port_gbps
    wire = 2 * (world - 1) / world * nbytes / gbps / 1e3
    low_latency = NCCL_LL[0] + NCCL_LL[1] * hops + LL_WIRE * wire
    return min(low_latency, NCCL_SIMPLE[0] + NCCL_SIMPLE[1] * hops + wire)


def ctas_for(nbytes: int) -> int:
    """Thread blocks that a message is worth: few CTAs fill a PCIe link, more only shorten the arithmetic.

    One CTA of 256 threads writes 48 GB/s over Gen5 x16 and eight reach 52.6 (measured into pinned host memory).
    """
    for limit, ctas in ((16 << 10, 4), (96 << 10, 8), (384 << 10, 16)):
        if nbytes <= limit:
            return ctas
    return 24
