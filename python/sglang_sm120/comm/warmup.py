"""From nothing to a plan, once per group and model: cache, else probe, verdict, islands, candidates, plan.

Everything that touches a rig or SGLang is passed in, so the same function runs in a server, on the host engine
and over a software fabric.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from sglang_sm120.comm import plan_cache, planner
from sglang_sm120.comm.communicator import CollectiveError, Communicator
from sglang_sm120.comm.plan import BASELINE, Exchange, Plan, agree
from sglang_sm120.comm.planner import Candidate, Request
from sglang_sm120.fabric import islands as isl
from sglang_sm120.fabric import probe
from sglang_sm120.fabric.driver import EdgeDriver, NoAccess
from sglang_sm120.fabric.integrity import check_sums
from sglang_sm120.fabric.report import ProbeReport, vetoes
from sglang_sm120.fabric.verdict import Verdict, Veto

logger = logging.getLogger(__name__)

SHARING = "containers: --ipc=host and --cap-add SYS_PTRACE; GPUs: `sglang-sm120 doctor`"


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """What a group starts with; plan and vetoes are the same on every rank.

    `report` is None when the plan came from the cache without one, or nothing could be probed.
    """

    plan: Plan
    vetoes: tuple[Veto, ...]
    report: ProbeReport | None
    from_cache: bool
    seconds: float


def plan_group(
    request: Request,
    *,
    rank: int,
    exchange: Exchange,
    identity: plan_cache.Identity,
    cache: Path | None,
    driver: Callable[[], EdgeDriver | None] = lambda: None,
    candidates: Callable[[isl.Partition, Verdict], Sequence[Candidate]],
    known: Iterable[Veto] = (),
    force: bool = False,
    hints: Sequence[isl.Partition] = (),
    islands: isl.Partition | None = None,
    effort: probe.Effort = probe.FAST,
    sums: Callable[[str], Communicator | None] | None = None,
    path: str = "native",
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Planned:
    """Plan one group; collective over `exchange`, every rank passes the same but for rank, driver and vetoes.

    Args:
        identity: what the plan depends on; rank 0 looks it up in `cache` (None: no cache).
        driver: makes this rank's access to the others (collective), or None where nothing can be probed; called only
            when no kept plan serves.
        candidates: builds the candidates once islands and verdict are known, alike on every rank.
        known: vetoes of this rank found before the probe (user, versions, topology).
        force: the user forced the custom path: his own wishes do not count.
        hints, islands: partitions to consider, or the one to use.
        sums: gives the communicator of a backend, or None where it cannot be had; each allowed one then proves its
            sums (see `check_sums`).
        path: the fast path that the probe is for: vetoed already, it is not probed.
        device, dtype: where the communicators' tensors live, and what they hold.

    Raises:
        PlanRefused: a pinned backend cannot serve; on every rank.
        CollectiveError: ranks disagree, or rank 0 could not plan; on every rank.
    """
    begin = time.monotonic()
    verdict = Verdict(request.group, rank)
    verdict.add(known)
    if force:
        verdict.force()
    verdict.agree(exchange)
    measured: list[Veto] = []
    kept = _kept(rank, exchange, identity, cache)
    if kept is not None and _allowed(kept.plan, verdict):
        plan = agree(kept.plan, rank, exchange)
        # Bridges and IOMMU can change without a new kernel: the real kernel's sums are checked at every start.
        wrong = _check(_backends(plan), sums, request, rank, exchange, device, dtype)
        verdict.add(wrong)
        if _allowed(plan, verdict):
            return _done(plan, verdict, kept.report, True, begin)
        measured.extend(wrong)
    report, edges = None, None
    if verdict.allows(path):
        try:
            edges = driver()
        except NoAccess as error:  # on every rank alike
            measured.append(Veto(target=path, reason=str(error), remedy=SHARING, origin="exchange"))
            verdict.add(measured)
    if edges is not None:
        report = probe.run(edges, exchange, effort, [islands] if islands else hints)
        # Every rank holds the same report, so the vetoes need no second exchange.
        measured += vetoes(report)
        verdict.add(measured)
    if islands is None:
        islands = planner.choose_islands(report, request) if report else isl.flat(request.world)
    offered = list(candidates(islands, verdict))
    named = dict.fromkeys(c.backend for c in offered if c.backend != BASELINE)
    allowed = [b for b in named if verdict.allows(b)]
    measured += _check(allowed, sums, request, rank, exchange, device, dtype)
    verdict.add(measured)
    while True:
        plan = planner.make_plan(
            request,
            offered,
            report=report,
            islands=islands,
            verdict=verdict,
            rank=rank,
            exchange=exchange,
            previous=kept.plan if kept else None,
        )
        # A call that failed while it was timed has shown its backend to be broken, whatever the times of the others.
        broken = _broken(_backends(plan), sums, exchange)
        if not broken:
            break
        measured += broken
        verdict.add(broken)
    # A machine that failed is probed again at the next start: its remedy needs no new software. A way to run that a
    # sound backend does without is no failure of the machine.
    if rank == 0 and all("/" in veto.target for veto in measured):
        record = plan_cache.Record(identity=identity, plan=plan, report=report)
        plan_cache.store(cache, record)
    return _done(plan, verdict, report, False, begin)


def _check(
    backends: Sequence[str],
    sums: Callable[[str], Communicator | None] | None,
    request: Request,
    rank: int,
    exchange: Exchange,
    device: str,
    dtype: torch.dtype,
) -> list[Veto]:
    """Vetoes of the backends whose sums are wrong on some rank; the same on every rank."""
    if sums is None:
        return []
    found: list[Veto] = []
    for backend in backends:
        communicator = sums(backend)
        if communicator is None:
            found.append(Veto(target=backend, reason=f"{backend} cannot be set up", origin="start"))
        else:
            found += check_sums(
                communicator, backend, request.hidden, rank, exchange, device, dtype=dtype
            )
    return found


def _allowed(plan: Plan, verdict: Verdict) -> bool:
    """Whether the verdict leaves everything that the plan uses."""
    return all(verdict.allows(e.choice.name) for e in plan.entries)


def _backends(plan: Plan) -> list[str]:
    """What the plan uses besides the baseline."""
    return [b for b in dict.fromkeys(e.choice.backend for e in plan.entries) if b != BASELINE]


def _broken(
    backends: Sequence[str], sums: Callable[[str], Communicator | None] | None, exchange: Exchange
) -> list[Veto]:
    """Vetoes of the backends in which an earlier call failed on some rank; the same on every rank."""
    if sums is None or not backends:
        return []
    mine = {}
    for backend in backends:
        communicator = sums(backend)
        try:
            if communicator is not None:
                communicator.poll()
        except CollectiveError as error:
            mine[backend] = str(error)
    told = exchange(mine)
    return [
        Veto(
            target=backend,
            reason=f"{backend} failed while it was timed (rank {r}: {theirs[backend]})",
            ranks=(r,),
            origin="start",
        )
        for backend in backends
        for r, theirs in enumerate(told)
        if backend in theirs
    ]


def _kept(
    rank: int, exchange: Exchange, identity: plan_cache.Identity, cache: Path | None
) -> plan_cache.Record | None:
    """Rank 0's record of this identity, on all ranks; ranks with another identity are an error for all."""
    record = plan_cache.load(cache, identity) if rank == 0 else None
    told = exchange((msgspec.to_builtins(identity), msgspec.json.encode(record)))
    first = told[0][0]
    other = [r for r, (theirs, _) in enumerate(told) if theirs != first]
    if other:
        theirs = told[other[0]][0]
        differ = "; ".join(
            f"{field}: rank 0 has {first[field]}, rank {other[0]} has {theirs[field]}"
            for field in first
            if theirs[field] != first[field]
        )
        raise CollectiveError(
            f"rank {rank}, group {identity.group}: ranks {other} run other versions, rows or options than rank 0 "
            f"({differ}). Start all ranks with the same software and options."
        )
    return msgspec.json.decode(told[0][1], type=plan_cache.Record | None)


def _done(
    plan: Plan, verdict: Verdict, report: ProbeReport | None, cached: bool, begin: float
) -> Planned:
    return Planned(
        plan=plan,
        vetoes=tuple(verdict.vetoes),
        report=report,
        from_cache=cached,
        seconds=round(time.monotonic() - begin, 3),
    )


def log_once(planned: Planned, rank: int, paths: Sequence[str] = ("native",)) -> None:
    """Rank 0 writes what was decided: the plan's sentence and table, the verdict, and a line for each path that is off."""
    if rank != 0:
        return
    plan = planned.plan
    source = "kept from an earlier start" if planned.from_cache else "measured now"
    logger.info("%s (%s, %.2f s)", plan.sentence(), source, planned.seconds)
    console = Console(width=140, no_color=True, highlight=False)
    with console.capture() as shown:
        console.print(plan.table())
    logger.info("\n%s", shown.get().rstrip())
    verdict = Verdict(plan.group, 0)
    verdict.add(planned.vetoes)
    may = ", ".join(
        f"{path} {'may' if verdict.allows(path) else 'may not'} serve" for path in paths
    )
    seen = planned.report.sentence() if planned.report else "nothing was probed"
    logger.info("SM120 verdict for group %s: %s; %s", plan.group, may, seen)
    for path in paths:
        verdict.log_once(path)
