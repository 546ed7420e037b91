"""How one call of the GPU kernels runs, which ways there are for a group, and which is the default where no plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_sm120.comm import model
from sglang_sm120.comm.schedule import SCHEDULES
from sglang_sm120.fabric import islands as isl
from sglang_sm120.options import parse_islands

# Forms over pinned host memory with flags and outboxes (csrc/core/relay.h), numbered behind `SCHEDULES`.
RELAYS = ("relay_one_shot", "relay_two_shot")
NUMBERED = (*SCHEDULES, *RELAYS)

# Bytes up to which pushing to everyone beats the second hop of two-shot, by world size.
# Measured by benchmark/allreduce.py; see docs/kernels.md.
ONE_SHOT_BYTES = {2: 1 << 40, 3: 128 << 10, 4: 128 << 10}
ONE_SHOT_BYTES_LARGER = 16 << 10

# The same for the relay. At world 2 both forms move the same bytes; above, one-shot reads N/2 times as much, which
# is worth its shorter chain (about 4 us: a fence, a flag and a read through the link) below about this many bytes.
# Computed from 1.2 us per read and 50 GB/s, not measured.
RELAY_ONE_SHOT_BYTES = {2: 1 << 40}
RELAY_ONE_SHOT_BYTES_LARGER = 64 << 10


@dataclass(frozen=True)
class How:
    """How one call runs; equal on every rank.

    Attributes:
        schedule: a name of `sglang_sm120.comm.schedule.SCHEDULES` or `RELAYS`.
        cluster, group_warps, rows_per_cta, ctas: spread of a row over CTAs; zeros for the default.
        early_launch: let the next kernel be scheduled before this one ends (compute capability 9 and up).
    """

    schedule: str
    cluster: int = 0
    group_warps: int = 0
    rows_per_cta: int = 0
    ctas: int = 0
    early_launch: bool = True


def spread(
    rows: int, hidden: int, limit: int, *, norm: bool, clusters: bool = True, crowded: bool = False
) -> tuple[int, int, int, int]:
    """(cluster, group warps, rows per CTA, CTAs) of a call on at most `limit` CTAs.

    The rule of `choose` in csrc/cuda/channel.cu, whose limit is 16 CTAs up to 64 rows and 32 above.
    """
    tiles = -(-hidden // 256)
    most_warps = 16 if crowded else 32
    cluster, rows_per_cta = 1, 1
    most = 8 if clusters or not norm else 1
    while cluster < most and cluster * 2 * rows <= limit and tiles >= cluster * 6:
        cluster *= 2
    if norm and -(-tiles // cluster) > most_warps:
        cluster = 1
    while (
        rows_per_cta < 4
        and cluster == 1
        and rows > limit * rows_per_cta
        and tiles <= most_warps // (2 * rows_per_cta) * 4
    ):
        rows_per_cta *= 2
    share, warps = -(-tiles // cluster), most_warps // rows_per_cta
    group_warps = -(-share // -(-share // warps))
    return cluster, group_warps, rows_per_cta, min(-(-rows // rows_per_cta) * cluster, limit)


@dataclass(frozen=True)
class Group:
    """What the ways to run depend on; equal on every rank.

    Attributes:
        world: number of ranks.
        islands: their partition as text, empty for one island.
        lossless: values travel in the dtype.
        roomy: the GPU holds 32 CTAs of every rank that shares it.
        relay: the relay's forms are there.
        small: bytes up to which a slab holds every rank's whole message.
    """

    world: int
    islands: str
    lossless: bool
    roomy: bool
    relay: bool
    small: int

    def ways(self) -> Sequence[tuple[str, int]]:
        """Every schedule that fits the islands, also with fewer and with more CTAs than the default where that can be."""
        partition = parse_islands(self.islands) if self.islands else isl.flat(self.world)
        spreads = (0, 8, 32) if self.roomy else (0, 8)
        # Only the kernels for one island of 2, 4 or 8 ranks can be spread in more than one way.
        several = len(partition or ()) == 1 and self.world in (2, 4, 8) and self.lossless
        sweep = spreads if several else (0,)
        tiles = [(s, n) for s in model.fitting(partition or ()) for n in sweep]
        if not self.relay:
            return tiles
        # Two ranks read as many bytes in either form, in one-shot with a hop less.
        relays = RELAYS[:1] if self.world == 2 else RELAYS
        return tiles + [(s, n) for s in relays for n in spreads]

    def default(self, nbytes: int, largest: int | None) -> How:
        """One-shot up to `ONE_SHOT_BYTES`, above it two-shot or the islands' dataflow.

        With the relay, messages beyond `largest`, the limit of the forms in tiles, take it, likewise in one shot or two.
        """
        if self.relay and largest is not None and nbytes > largest:
            few = RELAY_ONE_SHOT_BYTES.get(self.world, RELAY_ONE_SHOT_BYTES_LARGER)
            return How(RELAYS[0] if nbytes <= few else RELAYS[1])
        limit = ONE_SHOT_BYTES.get(self.world, ONE_SHOT_BYTES_LARGER)
        if nbytes <= min(limit, self.small):
            return How("one_shot")
        return How("island_dataflow" if ";" in self.islands else "two_shot")
