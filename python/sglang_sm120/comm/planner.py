"""Making the plan: choose islands, time candidates on all ranks, let rank 0 decide, agree.

Ranks never decide alone: every rank runs the same candidates in the same order (a candidate's call is a
collective), times are exchanged, the slowest rank's time counts, rank 0 decides, the result is broadcast and its
digest compared. A rank that times differently therefore cannot choose differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from sglang_sm120.comm import model, timing
from sglang_sm120.comm.communicator import CollectiveError, Op
from sglang_sm120.comm.plan import BASELINE, Choice, Entry, Exchange, Plan, agree
from sglang_sm120.fabric import islands as isl
from sglang_sm120.fabric.report import ProbeReport, forbidden
from sglang_sm120.fabric.verdict import Verdict

MARGIN = 0.03  # how much faster than the baseline a candidate must be at every row count it serves
SWITCH_COST = 0.02  # what changing the candidate between neighbouring rows must gain, relative
NEAR = (
    0.03  # how close to the fastest counts as nearly the fastest where candidates are put in order
)
LOYALTY = 0.03  # what the choice of the previous plan is worth, so that noise does not move it
# How much faster than anything of ours a backend must be: FlashInfer's waits have no bound, and its sums have not the
# canonical bits.
HANDICAP = {"flashinfer": 0.1}
OURS = ("native", "mailbox", "host")  # backends whose schedule this plan picks


class PlanRefused(RuntimeError):
    """A pinned backend cannot serve; the text says why and what to change."""


class Candidate(msgspec.Struct, frozen=True):
    """One way to serve calls.

    `time(op, rows)` runs the call some times on this rank, together with all other ranks, and returns microseconds
    per call; it may raise, which takes the candidate out on every rank. The number of calls it makes must
    not depend on the clock, or ranks would come apart. None means that only the model is asked.
    `widest` is the largest row count it can serve; 0 is unlimited.
    """

    backend: str
    schedule: str = ""
    ctas: int = 0
    time: Callable[[Op, int], float] | None = None
    widest: int = 0

    @property
    def choice(self) -> Choice:
        """The plan's word for it."""
        return Choice(backend=self.backend, schedule=self.schedule, ctas=self.ctas)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to plan for; the same on every rank.

    Attributes:
        rows: the captured row counts (`plan.captured_rows`), ascending.
        pin: a backend that must serve ("" is auto).
        timed_rows: at how many of `rows` candidates are timed; the others are interpolated.
    """

    group: str
    world: int
    hidden: int
    itemsize: int
    rows: tuple[int, ...]
    ops: tuple[Op, ...] = (Op.ALL_REDUCE, Op.ALL_REDUCE_RMSNORM)
    pin: str = ""
    timed_rows: int = 6

    def nbytes(self, rows: int) -> int:
        """Bytes that one rank contributes to a call of `rows` rows."""
        return rows * self.hidden * self.itemsize


def choose_islands(report: ProbeReport, request: Request) -> isl.Partition:
    """The partition with the least modelled time over all row counts, among those the probe saw.

    Sums are taken in island order, so this is decided once, before any communicator exists. Schedules that
    collapse in a partition do not count for it. Ties go to fewer islands.
    """
    tried = sorted({p.islands for p in report.patterns}, key=lambda p: (len(p), p))
    usable = [p for p in {isl.flat(report.world): None, **dict.fromkeys(tried)} if isl.fits(p)]
    if not usable or not report.store_gbps:
        return isl.flat(report.world)

    def cost(partition: isl.Partition) -> float:
        c = model.constants(report, partition)
        banned = forbidden(report, partition)
        allowed = [s for s in model.SCHEDULES if s not in banned]
        total = 0.0
        for rows in request.rows:
            n = request.nbytes(rows)
            ours = [model.schedule_us(s, n, partition, c) for s in allowed]
            total += min([*ours, model.nccl_us(n, partition, c)])
        return round(total, 3)

    return min(usable, key=lambda p: (cost(p), len(p)))


def own_candidates(islands: isl.Partition, backend: str) -> list[Candidate]:
    """Candidates of one of our backends that only the model judges: every schedule that fits the partition."""
    return [Candidate(backend, schedule) for schedule in model.fitting(islands)]


def make_plan(
    request: Request,
    candidates: Sequence[Candidate],
    *,
    report: ProbeReport | None,
    islands: isl.Partition,
    verdict: Verdict,
    rank: int,
    exchange: Exchange,
    previous: Plan | None = None,
) -> Plan:
    """Time, decide and agree; collective over `exchange`.

    Args:
        candidates: the same list on every rank, with the baseline ("nccl") among them wherever it can be timed.
        report: the probe's; None where there is nothing to probe.
        verdict: agreed; backends it vetoes are out.
        previous: an earlier plan of this machine, whose choices get a small bonus.

    Returns:
        The plan, the same on every rank.

    Raises:
        PlanRefused: `request.pin` names a backend that is vetoed, absent, or left without a schedule; on all ranks.
        CollectiveError: ranks hold different plans, or a candidate took a rank's GPU away; on all ranks.
    """
    banned = forbidden(report, islands) if report else {}
    notes: list[str] = []
    alive = []
    for c in candidates:
        if c.backend != BASELINE and not verdict.allows(c.backend):
            note = f"{c.backend} is off: {verdict.why(c.backend)}"
            notes.extend([note] if note not in notes else [])
        elif not (c.backend in OURS and c.schedule in banned):
            alive.append(c)
    if request.pin:
        alive = [c for c in alive if c.backend == request.pin]
        if not alive:
            why = verdict.why(request.pin) or "; ".join(f"{k}: {v}" for k, v in banned.items())
            raise PlanRefused(
                f"--sm120-backend {request.pin} cannot serve group {request.group}: "
                f"{why or 'no candidate of that backend'}. Use --sm120-backend auto."
            )
    sample = spread(request.rows, request.timed_rows)
    mine, failed, dead = _time(alive, request.ops, sample)
    told = exchange((mine, failed, dead))
    for r, (_, _, why) in enumerate(told):
        if why:
            raise CollectiveError(
                f"rank {rank}, group {request.group}: rank {r} lost its GPU while a candidate was timed: {why}. "
                "Pin a backend with --sm120-backend, or start without --enable-sm120-fusion."
            )
    problems = [f"{n} (rank {r})" for r, (_, lost, _) in enumerate(told) for n in lost]
    notes.extend(f"failed while timed: {p}" for p in problems)
    plan, refused = None, ""
    if rank == 0:
        times = _slowest([t for t, _, _ in told])
        entries: list[Entry] = []
        try:
            for op in request.ops:
                entries += _decide(request, op, alive, times, sample, report, islands, previous)
            if request.pin and not any(e.choice.backend == request.pin for e in entries):
                refused = "it serves none of the captured rows"
        except PlanRefused as why:  # the others wait for the plan
            refused = str(why)
        plan = Plan(
            group=request.group,
            world=request.world,
            hidden=request.hidden,
            itemsize=request.itemsize,
            islands=islands,
            entries=tuple(entries),
            forbidden=banned,
            notes=tuple(notes),
        )
    refused = exchange(refused)[0]
    if refused:
        named = f"--sm120-backend {request.pin} cannot serve group {request.group}: " * bool(request.pin)  # fmt: skip
        raise PlanRefused("; ".join([f"{named}{refused}", *problems]))
    return agree(plan, rank, exchange)


def spread(rows: Sequence[int], count: int) -> tuple[int, ...]:
    """At most `count` of `rows`, the first and last among them, evenly spaced by ratio."""
    if len(rows) <= count:
        return tuple(rows)
    low, high = math.log(rows[0]), math.log(rows[-1])
    marks = [math.exp(low + (high - low) * i / (count - 1)) for i in range(count)]
    near = {min(rows, key=lambda r: (abs(math.log(r / m)), r)) for m in marks}
    return tuple(sorted(near | {rows[0], rows[-1]}))


Times = dict[tuple[str, str, int], float]  # (candidate, op, rows) -> microseconds


def _time(
    candidates: Sequence[Candidate], ops: Sequence[Op], sample: Sequence[int]
) -> tuple[Times, list[str], str]:
    """This rank's times of all timed candidates, in one order on all ranks; what failed; and what took the GPU away."""
    out: Times = {}
    failed: list[str] = []
    for c in candidates:
        if c.time is None:
            continue
        for op in ops:
            for rows in sample:
                if c.widest and rows > c.widest:
                    continue
                key = (c.choice.name, op.value, rows)
                try:
                    out[key] = c.time(op, rows)
                except Exception as error:  # takes this candidate out on all ranks, not the server
                    out[key] = math.inf
                    failed.append(f"{c.choice.name} {op.value} {rows} rows: {error}")
                    if not timing.usable():
                        return out, failed, failed[-1]
    return out, failed, ""


def _slowest(told: Sequence[Times]) -> Times:
    """Per measurement the slowest rank: a sum is done when its last rank is; missing anywhere means out."""
    return {key: max(t.get(key, math.inf) for t in told) for key in told[0]}


def _decide(
    request: Request,
    op: Op,
    candidates: Sequence[Candidate],
    times: Times,
    sample: Sequence[int],
    report: ProbeReport | None,
    islands: isl.Partition,
    previous: Plan | None,
) -> list[Entry]:
    """Entries of one operation."""
    constants = model.constants(report, islands) if report and report.store_gbps else None
    curves: dict[str, list[tuple[float, str]]] = {}
    for c in candidates:
        curves[c.choice.name] = [
            _expected(c, op, rows, times, sample, request, islands, constants)
            for rows in request.rows
        ]
    choices = {c.choice.name: c.choice for c in candidates}
    if BASELINE not in curves:
        # Where a pinned backend cannot serve, the baseline does, at whatever time.
        modelled = constants if not request.pin else None
        choices[BASELINE] = Choice(backend=BASELINE)
        curves[BASELINE] = [
            (model.nccl_us(request.nbytes(r), islands, modelled) if modelled else math.inf, "model")
            for r in request.rows
        ]
    before = [previous.lookup(op, r).name if previous else "" for r in request.rows]
    picked = cheapest_path({n: [t for t, _ in c] for n, c in curves.items()}, before)
    entries = []
    for i, (rows, name) in enumerate(zip(request.rows, picked, strict=True)):
        us, source = curves[name][i]
        base = curves[BASELINE][i][0] if BASELINE in curves else 0.0
        ctas = choices[name].ctas
        if not ctas and source == "model" and choices[name].backend in OURS:
            ctas = model.ctas_for(request.nbytes(rows))
        entries.append(
            Entry(
                op,
                rows,
                msgspec.structs.replace(
                    choices[name],
                    ctas=ctas,
                    us=round(us, 2) if math.isfinite(us) else 0.0,
                    baseline_us=round(base, 2) if math.isfinite(base) else 0.0,
                    source="pinned" if choices[name].backend == request.pin else source,
                ),
            )
        )
    return entries


def _expected(
    c: Candidate,
    op: Op,
    rows: int,
    times: Times,
    sample: Sequence[int],
    request: Request,
    islands: isl.Partition,
    constants: model.Constants | None,
) -> tuple[float, str]:
    """Expected microseconds of a candidate at `rows`, and where they come from."""
    if c.widest and rows > c.widest:
        return math.inf, "model"
    if c.time is not None:
        known = [(r, times.get((c.choice.name, op.value, r), math.inf)) for r in sample]
        known = [(r, t) for r, t in known if not (c.widest and r > c.widest)]
        return _between(known, rows)
    if constants is None:
        return math.inf, "model"
    n = request.nbytes(rows)
    if c.backend == BASELINE:
        return model.nccl_us(n, islands, constants), "model"
    return model.schedule_us(c.schedule, n, islands, constants), "model"


def _between(known: Sequence[tuple[int, float]], rows: int) -> tuple[float, str]:
    """The timed value, or the straight line between its timed neighbours (the upper one at the ends)."""
    exact = dict(known).get(rows)
    if exact is not None:
        return exact, "timed"
    below = [k for k in known if k[0] < rows]
    above = [k for k in known if k[0] > rows]
    if not below or not above:
        return math.inf, "timed"
    (r0, t0), (r1, t1) = below[-1], above[0]
    if not (math.isfinite(t0) and math.isfinite(t1)):
        return math.inf, "timed"
    return t0 + (t1 - t0) * (rows - r0) / (r1 - r0), "between"


def cheapest_path(curves: Mapping[str, Sequence[float]], before: Sequence[str]) -> list[str]:
    """One candidate per row count: near the fastest everywhere, few changes, never back again.

    Candidates are ordered by the row counts at which they are nearly the fastest; the choice may only move forward in
    that order (a candidate serves one unbroken range of rows). Among such paths the one with the least total excess over
    the fastest, plus `SWITCH_COST` per change, wins. Where the baseline is among the candidates, one that is not
    `MARGIN` faster than it is not allowed; `before` names the previous choice per row count.

    Returns:
        Names, one per row count; the baseline where nothing else is allowed.

    Raises:
        PlanRefused: no candidate has a finite time at some row count and there is no baseline.
    """
    length = len(before)
    base = curves.get(BASELINE)

    def effective(name: str, i: int) -> float:
        t = curves[name][i]
        if name == BASELINE:
            return t if math.isfinite(t) else 1e12  # always allowed: it is what SGLang does anyway
        if base is not None and math.isfinite(base[i]) and t > base[i] * (1 - MARGIN):
            return math.inf
        t *= 1 + HANDICAP.get(name.split("/")[0], 0.0)
        return t * (1 - LOYALTY) if name == before[i] else t

    costs = {n: [effective(n, i) for i in range(length)] for n in curves}
    floors = [min(c[i] for c in costs.values()) for i in range(length)]
    for i, floor in enumerate(floors):
        if not math.isfinite(floor):
            raise PlanRefused(f"no candidate works at entry {i} of {length}")

    def centre(name: str) -> float:
        """Mean position of the rows at which a candidate is nearly the fastest; infinite when it never is."""
        weights = [
            max(0.0, 1 + NEAR - t / floor) for t, floor in zip(costs[name], floors, strict=True)
        ]
        total = sum(weights)
        return sum(i * w for i, w in enumerate(weights)) / total if total else math.inf

    order = sorted(curves, key=lambda n: (centre(n), n))

    best: list[list[float]] = []
    came: list[list[int]] = []
    for i in range(length):
        now, floor = [costs[n][i] for n in order], floors[i]
        row: list[float] = []
        back: list[int] = []
        for k, t in enumerate(now):
            step = t / floor - 1 if math.isfinite(t) else math.inf
            if i == 0:
                row.append(step)
                back.append(k)
                continue
            options = [best[i - 1][j] + (SWITCH_COST if j != k else 0.0) for j in range(k + 1)]
            j = min(range(k + 1), key=options.__getitem__)
            row.append(options[j] + step)
            back.append(j)
        best.append(row)
        came.append(back)
    if not math.isfinite(min(best[-1])):
        # No unbroken ranges fit (a candidate failed in the middle): the baseline, or the fastest each time.
        if base is not None:
            return [BASELINE] * length
        return [min(order, key=lambda n, i=i: costs[n][i]) for i in range(length)]  # type: ignore[misc]
    k = min(range(len(order)), key=best[-1].__getitem__)
    picked = [order[k]]
    for i in range(length - 1, 0, -1):
        k = came[i][k]
        picked.append(order[k])
    return picked[::-1]
