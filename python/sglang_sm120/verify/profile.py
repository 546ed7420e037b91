"""Where a pass's time goes: communication, compute and idle, per pass, per layer and per rank."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from sglang_sm120.verify.pace import Slow, slow_ranks
from sglang_sm120.verify.trace import Pass, RankTrace, TraceError, Work

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of intervals as disjoint ones, ascending."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def length(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Length common to two lists of disjoint ascending intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


@dataclass(frozen=True)
class Split:
    """A span of device time in microseconds; span = exposed + compute + idle.

    Attributes:
        exposed: communication with nothing else running.
        hidden: communication under compute (part of `compute`).
        compute: anything that is not communication.
        idle: no kernel at all.
    """

    span: float
    exposed: float
    hidden: float
    compute: float
    idle: float

    @property
    def communication(self) -> float:
        """All communication, hidden or not."""
        return self.exposed + self.hidden


def split(work: Sequence[Work], start: float, end: float) -> Split:
    """Divide a span of device time; kernels of all streams count, clipped to the span."""
    clipped = [(max(w.start, start), min(w.end, end), bool(w.operation)) for w in work]
    clipped = [c for c in clipped if c[1] > c[0]]
    comm = merge((a, b) for a, b, is_comm in clipped if is_comm)
    compute = merge((a, b) for a, b, is_comm in clipped if not is_comm)
    hidden = overlap(comm, compute)
    busy = length(comm) + length(compute) - hidden
    return Split(
        span=end - start,
        exposed=length(comm) - hidden,
        hidden=hidden,
        compute=length(compute),
        idle=max(0.0, end - start - busy),
    )


@dataclass(frozen=True)
class Segment:
    """One all-reduce and the compute before it.

    Attributes:
        layer: 0-based, -1 for sums outside the layers (embedding).
        place: "attention", "ffn" or "outside".
        us: length of the all-reduce.
        before: split of the time since the all-reduce before.
        norm_us: RMSNorm kernels that follow directly.
    """

    layer: int
    place: str
    us: float
    bytes: int
    who: str
    before: Split
    norm_us: float


@dataclass(frozen=True)
class PassReport:
    """One pass, analysed."""

    kind: str
    batch: int
    split: Split
    segments: tuple[Segment, ...]
    tail: Split
    others: tuple[tuple[str, str, float], ...]

    @property
    def all_reduces(self) -> int:
        return len(self.segments)


def analyse_pass(item: Pass, layers: int | None = None) -> PassReport:
    """Cut a pass at its all-reduces.

    Args:
        item: the pass.
        layers: decoder layers; by default half the number of all-reduces. Two sums per layer are the
            last ones of the pass; what comes before them is outside the layers.
    """
    sums = [w for w in item.work if w.operation == "all-reduce"]
    count = layers if layers is not None else len(sums) // 2
    outside = max(0, len(sums) - 2 * count)
    starts = [w.start for w in item.work]
    longest = max(w.us for w in item.work)

    def near(low: float, high: float) -> Sequence[Work]:
        """Work that can touch a span; a pass has thousands of kernels, a segment a dozen."""
        return item.work[bisect_left(starts, low - longest) : bisect_left(starts, high)]

    segments = []
    cut = item.start
    for index, current in enumerate(sums):
        place = "outside"
        layer = -1
        if index >= outside:
            layer, half = divmod(index - outside, 2)
            place = "ffn" if half else "attention"
        segments.append(
            Segment(
                layer,
                place,
                current.us,
                current.bytes,
                current.who,
                split(near(cut, current.start), cut, current.start),
                _norm_after(item.work[bisect_left(starts, current.end) :], current),
            )
        )
        cut = max(cut, current.end)
    return PassReport(
        item.kind,
        item.batch,
        split(item.work, item.start, item.end),
        tuple(segments),
        split(item.work, cut, item.end),
        tuple(
            (w.operation, w.who, w.us) for w in item.work if w.operation not in ("", "all-reduce")
        ),
    )


def _norm_after(following: Sequence[Work], current: Work) -> float:
    same_stream = (w for w in following if w.stream == current.stream)
    for candidate in islice(same_stream, 2):
        if candidate.norm:
            return candidate.us
        if candidate.operation:
            break
    return 0.0


@dataclass(frozen=True)
class KindReport:
    """All passes of one kind on one rank; times are means in microseconds."""

    kind: str
    passes: tuple[PassReport, ...]

    def mean(self, what: str) -> float:
        """Mean of one part of the split: span, exposed, hidden, compute, idle or communication."""
        return statistics.fmean(getattr(p.split, what) for p in self.passes)

    @property
    def all_reduces(self) -> int:
        """All-reduces per pass: the most common number."""
        return Counter(p.all_reduces for p in self.passes).most_common(1)[0][0]

    @property
    def typical(self) -> PassReport:
        """The pass of median length among those with the usual number of all-reduces."""
        usual = [p for p in self.passes if p.all_reduces == self.all_reduces]
        return sorted(usual, key=lambda p: p.split.span)[(len(usual) - 1) // 2]

    def all_reduce_kinds(self) -> list[tuple[str, int, int, float]]:
        """(library, bytes or 0, count per pass, mean us), most time first."""
        groups: dict[tuple[str, int], list[float]] = {}
        for item in self.passes:
            for segment in item.segments:
                groups.setdefault((segment.who, segment.bytes), []).append(segment.us)
        rows = [
            (who, size, round(len(us) / len(self.passes)), statistics.fmean(us))
            for (who, size), us in groups.items()
        ]
        return sorted(rows, key=lambda r: -r[2] * r[3])


@dataclass(frozen=True)
class Skew:
    """What ranks waited for one another, per pass, in microseconds.

    Attributes:
        transfer: the shortest all-reduce of each index over the ranks, summed: nobody waited there.
        waiting: rank -> its all-reduce time above that.
        late: the rank that waited least: the others waited for it.
    """

    transfer: float
    waiting: dict[int, float]
    late: int


@dataclass(frozen=True)
class Profile:
    """Everything the report shows.

    Attributes:
        ranks: rank -> kind -> report.
        skew: kind -> skew, for kinds that all ranks have with equal counts.
        gap_us: device idle time between one pass and the next, mean, on the lowest rank.
        slow: ranks whose processor ran slower than another's.
    """

    ranks: dict[int, dict[str, KindReport]]
    skew: dict[str, Skew]
    gap_us: float
    slow: tuple[Slow, ...] = ()

    @property
    def main(self) -> dict[str, KindReport]:
        """The lowest rank's reports."""
        return self.ranks[min(self.ranks)]


def analyse(traces: Sequence[RankTrace], layers: int | None = None) -> Profile:
    """Analyse the traces of one or several ranks.

    Raises:
        TraceError: no passes, or a rank given twice.
    """
    if not traces or not any(t.passes for t in traces):
        raise TraceError("no passes were found in the trace")
    ranks: dict[int, dict[str, KindReport]] = {}
    for trace in traces:
        if trace.rank in ranks:
            raise TraceError(f"rank {trace.rank} was given twice")
        kinds: dict[str, list[PassReport]] = {}
        for item in trace.passes:
            kinds.setdefault(item.kind, []).append(
                analyse_pass(item, layers if item.kind != "DRAFT" else None)
            )
        ranks[trace.rank] = {k: KindReport(k, tuple(v)) for k, v in kinds.items()}
    skew = {kind: s for kind in ranks[min(ranks)] if (s := _skew(ranks, kind)) is not None}
    first = next(t for t in traces if t.rank == min(ranks))
    gaps = [max(0.0, b.start - a.end) for a, b in zip(first.passes, first.passes[1:])]
    slow = tuple(slow_ranks({t.rank: t.paces for t in traces}))
    return Profile(ranks, skew, statistics.fmean(gaps) if gaps else 0.0, slow)


def _skew(ranks: dict[int, dict[str, KindReport]], kind: str) -> Skew | None:
    if len(ranks) < 2 or any(kind not in kinds for kinds in ranks.values()):
        return None
    reports = {rank: kinds[kind].passes for rank, kinds in ranks.items()}
    shapes = {tuple(p.all_reduces for p in passes) for passes in reports.values()}
    if len(shapes) != 1 or not any(next(iter(shapes))):
        return None
    transfer = 0.0
    waiting = dict.fromkeys(reports, 0.0)
    count = len(next(iter(reports.values())))
    for passes in zip(*reports.values()):
        for segments in zip(*(p.segments for p in passes)):
            shortest = min(s.us for s in segments)
            transfer += shortest
            for rank, segment in zip(reports, segments):
                waiting[rank] += segment.us - shortest
    waiting = {rank: us / count for rank, us in waiting.items()}
    return Skew(transfer / count, waiting, min(waiting, key=lambda r: waiting[r]))
