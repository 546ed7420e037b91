"""Making the plan: choose islands, time candidates on all ranks, let rank 0 decide, agree.

Ranks never decide alone: every rank runs the same candidates in the same order (a candidate's call is a
collective), times are exchanged, the slowest rank's time counts, rank 0 decides, the result is broadcast and its
digest compared. A rank that times differently therefore cannot choose differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from sglang_sm120.comm import model, timing
from sglang_sm120.comm.choosing import PlanRefused, cheapest_path
from sglang_sm120.comm.communicator import CollectiveError, Op
from sglang_sm120.comm.plan import BASELINE, Choice, Entry, Exchange, Plan, agree
from sglang_sm120.fabric import islands as isl
from sglang_sm120.fabric.report import ProbeReport, forbidden
from sglang_sm120.fabric.verdict import Verdict

# The further looks: how many candidates at a row count, how near to the fastest in each look, and rows between two
# sampled ones. One call takes a few microseconds, of which single timings miss some 5 %.
LOOK_CANDIDATES, LOOK_NEAR, LOOK_BETWEEN = 6, (0.5, 0.1), 2
OURS = ("native", "mailbox", "host")  # backends whose schedule this plan picks


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
    timed_rows: int = 8

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
        if c.backend != BASELINE and not verdict.allows(c.choice.name):
            off = c.choice.name if verdict.allows(c.backend) else c.backend
            note = f"{off} is off: {verdict.why(off)}"
            notes.extend([note] if note not in notes else [])
        elif not (c.backend in OURS and c.schedule in banned):
            alive.append(c)
    # GPUs of two kinds may offer different ways to run; what not every rank would time is nobody's.
    held = exchange([c.choice.name for c in alive])
    common = [n for n in held[0] if all(n in theirs for theirs in held)]
    for name in dict.fromkeys(n for theirs in held for n in theirs):
        lacking = [r for r, theirs in enumerate(held) if name not in theirs]
        notes.extend(
            [f"{name} is left out: rank {lacking[0]} does not offer it"] if lacking else []
        )
    alive = sorted(
        (c for c in alive if c.choice.name in common), key=lambda c: common.index(c.choice.name)
    )
    if request.pin:
        alive = [c for c in alive if c.backend == request.pin]
        if not alive:
            why = verdict.why(request.pin) or "; ".join(
                [n for n in notes if n.startswith(request.pin)]
                + [f"{k}: {v}" for k, v in banned.items()]
            )
            raise PlanRefused(
                f"--sm120-backend {request.pin} cannot serve group {request.group}: "
                f"{why or 'no candidate of that backend'}. Use --sm120-backend auto."
            )
    sample = spread(request.rows, request.timed_rows)
    times: Times = {}
    todo = _first(alive, request.ops, sample)
    for near in (*LOOK_NEAR, None):
        mine, failed, dead = _time(alive, todo)
        told = exchange((mine, failed, dead))
        for r, (_, _, why) in enumerate(told):
            if why:
                raise CollectiveError(
                    f"rank {rank}, group {request.group}: rank {r} lost its GPU while a candidate was timed: {why}. "
                    "Pin a backend with --sm120-backend, or start without --enable-sm120-fusion."
                )
        problems = [f"{n} (rank {r})" for r, (_, lost, _) in enumerate(told) for n in lost]
        notes.extend(f"failed while timed: {p}" for p in problems)
        for key, us in _slowest([t for t, _, _ in told]).items():
            # Noise only adds: the fastest of several looks is nearest to the truth; a failure stays one.
            before = times.get(key, us)
            times[key] = max(us, before) if math.inf in (us, before) else min(us, before)
        if near is not None:
            todo = exchange(_close(request, times, sample, near) if rank == 0 else None)[0]
    problems = [note for note in notes if note.startswith("failed while timed")]
    plan, refused = None, ""
    if rank == 0:
        entries: list[Entry] = []
        try:
            for op in request.ops:
                entries += _decide(request, op, alive, times, report, islands, previous)
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
    """At most `count` (2 or more) of `rows`, the first and last among them, evenly spaced by ratio."""
    if len(rows) <= count:
        return tuple(rows)
    low, high = math.log(rows[0]), math.log(rows[-1])
    marks = [math.exp(low + (high - low) * i / (count - 1)) for i in range(count)]
    near = {min(rows, key=lambda r: (abs(math.log(r / m)), r)) for m in marks}
    return tuple(sorted(near | {rows[0], rows[-1]}))


Times = dict[tuple[str, str, int], float]  # (candidate, op, rows) -> microseconds


Todo = list[tuple[str, Op, int]]  # (candidate, op, rows) to time, in one order on all ranks


def _first(candidates: Sequence[Candidate], ops: Sequence[Op], sample: Sequence[int]) -> Todo:
    """Everything at the sampled rows."""
    return [
        (c.choice.name, op, rows)
        for c in candidates
        if c.time is not None
        for op in ops
        for rows in sample
        if not (c.widest and rows > c.widest)
    ]


def _close(request: Request, times: Times, sample: Sequence[int], near: float) -> Todo:
    """What is worth another look: at each sampled row count the candidates that are nearly the fastest, and between
    two sampled ones those of either side, so that a change is put where it belongs."""
    names = list(dict.fromkeys(name for name, _, _ in times))

    def leaders(op: Op, rows: int) -> list[str]:
        here = sorted((times.get((n, op.value, rows), math.inf), n) for n in names)
        return [n for t, n in here[:LOOK_CANDIDATES] if t <= here[0][0] * (1 + near)]

    out: Todo = []
    for op in request.ops:
        best = {rows: leaders(op, rows) for rows in sample}
        for rows in sample:
            out += [(n, op, rows) for n in best[rows] if len(best[rows]) > 1]
        for low, high in zip(sample, sample[1:], strict=False):
            either = list(dict.fromkeys(best[low] + best[high]))
            between = [r for r in request.rows if low < r < high]
            if len(either) > 1 and between:
                out += [(n, op, r) for r in spread(between, LOOK_BETWEEN) for n in either]
    return sorted(out, key=lambda item: (item[0], item[1].value, item[2]), reverse=True)


def _time(candidates: Sequence[Candidate], todo: Todo) -> tuple[Times, list[str], str]:
    """This rank's times of `todo`, in that order on all ranks; what failed; and what took the GPU away."""
    out: Times = {}
    failed: list[str] = []
    timers = {c.choice.name: c.time for c in candidates}
    for name, op, rows in todo:
        timer = timers[name]
        if timer is None:
            continue
        key = (name, op.value, rows)
        try:
            out[key] = timer(op, rows)
        except Exception as error:  # takes this candidate out on all ranks, not the server
            out[key] = math.inf
            failed.append(f"{name} {op.value} {rows} rows: {error}")
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
    report: ProbeReport | None,
    islands: isl.Partition,
    previous: Plan | None,
) -> list[Entry]:
    """Entries of one operation."""
    constants = model.constants(report, islands) if report and report.store_gbps else None
    curves: dict[str, list[tuple[float, str]]] = {}
    for c in candidates:
        curves[c.choice.name] = [
            _expected(c, op, rows, times, request, islands, constants) for rows in request.rows
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
    request: Request,
    islands: isl.Partition,
    constants: model.Constants | None,
) -> tuple[float, str]:
    """Expected microseconds of a candidate at `rows`, and where they come from."""
    if c.widest and rows > c.widest:
        return math.inf, "model"
    if c.time is not None:
        mine = (c.choice.name, op.value)
        known = sorted((r, t) for (name, at, r), t in times.items() if (name, at) == mine)
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
