"""Latency of collectives on a described machine: build a call, run the event engine, report.

    from sglang_sm120.fabric import machine, simulate
    box = machine.load("two-switches.toml")
    simulate.rival(box, "nccl", 57344).total_us

Simulated figures are projections: see docs/simulator.md for how far they were from published tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from sglang_sm120.fabric import rivals, simulate_own
from sglang_sm120.fabric.machine import Machine
from sglang_sm120.fabric.simulate_engine import (
    HopTime,
    LinkUse,
    Network,
    SimulationError,
    run,
)
from sglang_sm120.fabric.simulate_own import COSTS, Costs

__all__ = [
    "COSTS",
    "Estimate",
    "SimulationError",
    "any_method",
    "applicable",
    "estimate",
    "healthy",
    "methods",
    "own",
    "own_best",
    "own_names",
    "rival",
]


class Estimate(msgspec.Struct, frozen=True):
    """Latency of one collective call.

    Attributes:
        method: schedule or rival; `label` the variant it chose.
        nbytes: message size per rank.
        total_us: launch to last rank's result.
        fixed_us: the part of it that no link or hop shows.
        hops, links: time line and link loads, see `simulate_engine.Run`.
    """

    method: str
    label: str
    nbytes: int
    total_us: float
    fixed_us: float
    hops: tuple[HopTime, ...]
    links: tuple[LinkUse, ...]

    @property
    def busiest(self) -> LinkUse | None:
        """The link direction that was needed for the largest share of the time."""
        return self.links[0] if self.links else None


# Machines are mutable structs without a hash, so what is made from them is kept by identity.
_NETWORKS: dict[tuple[int, tuple[int, ...], float, float], tuple[Machine, Network]] = {}
_MAILBOXES: dict[int, tuple[Machine, Machine]] = {}


def network_of(
    machine: Machine, ranks: Sequence[int], store_gbps: float = 0.0, load_gbps: float = 0.0
) -> Network:
    """The compiled network of `machine` with each GPU's own traffic limited; compiled once per combination."""
    key = (id(machine), tuple(ranks), store_gbps, load_gbps)
    kept = _NETWORKS.get(key)
    if kept is not None and kept[0] is machine:
        return kept[1]
    gpus = tuple(
        msgspec.structs.replace(
            gpu,
            store_bandwidth=min(gpu.store_bandwidth, store_gbps or gpu.store_bandwidth),
            load_bandwidth=min(gpu.load_bandwidth, load_gbps or gpu.load_bandwidth),
        )
        for gpu in machine.gpus
    )
    if len(_NETWORKS) > 256:
        _NETWORKS.clear()
    network = Network(msgspec.structs.replace(machine, gpus=gpus), ranks)
    _NETWORKS[key] = (machine, network)
    return network


def estimate(
    machine: Machine, call: rivals.Call, nbytes: int, method: str, ranks: Sequence[int]
) -> Estimate:
    """Simulate one call."""
    done = run(network_of(machine, ranks, call.store_gbps, call.load_gbps), call.transfers)
    return Estimate(
        method=method,
        label=call.label,
        nbytes=nbytes,
        total_us=call.fixed_us + done.total_us,
        fixed_us=call.fixed_us,
        hops=done.hops,
        links=done.links,
    )


def rival(
    machine: Machine,
    method: str,
    nbytes: int,
    ranks: Sequence[int] | None = None,
    constants: rivals.Constants = rivals.CONSTANTS,
) -> Estimate:
    """Latency of a rival's all-reduce of `nbytes` bytes per rank.

    Method "nccl" is NCCL with its protocol well chosen: the faster of LL and Simple.

    Raises:
        KeyError: the method is not one of `rivals.RIVALS` or "nccl".
    """
    taking = tuple(range(machine.world) if ranks is None else ranks)
    names = ("nccl-ll", "nccl-simple") if method == "nccl" else (method,)
    tries = [
        estimate(
            machine, rivals.RIVALS[n](machine, taking, nbytes, constants), nbytes, method, taking
        )
        for n in names
    ]
    return min(tries, key=lambda e: e.total_us)


def healthy(machine: Machine) -> Machine:
    """The same tree without collapse rules and faults; peer access stays as the driver offers it."""
    return msgspec.structs.replace(machine, collapse=(), faults=())


@lru_cache(maxsize=1)
def methods() -> tuple[str, ...]:
    """Names of all rival models."""
    return ("nccl", *rivals.RIVALS)


def own_names() -> tuple[str, ...]:
    """Names of the plugin's schedules."""
    return simulate_own.names()


def own(
    machine: Machine,
    schedule: str,
    rows: int,
    hidden: int,
    ranks: Sequence[int] | None = None,
    costs: Costs = COSTS,
) -> Estimate:
    """Latency of one of the plugin's schedules for all-reduce + residual + RMSNorm of [rows, hidden] bf16.

    Of the partitions into islands that the tree suggests (by switch, root port or socket) the fastest is taken; the
    estimate's `label` names it.

    Raises:
        SimulationError: the schedule does not exist or cannot serve this machine; the text says why.
    """
    taking = tuple(range(machine.world) if ranks is None else ranks)
    tries: list[Estimate] = []
    reasons: list[str] = []
    box = _mailbox(machine) if schedule == "mailbox" else machine
    flat = (tuple(range(len(taking))),)
    islands = schedule.startswith("island") or schedule == "mailbox"
    for partition in simulate_own.partitions(machine, taking) if islands else (flat,):
        reason = simulate_own.refusal(machine, schedule, taking, partition)
        if reason:
            reasons.append(reason)
            continue
        call = simulate_own.build(schedule, partition, rows, hidden, costs)
        tries.append(estimate(box, call, rows * hidden * 2, schedule, taking))
    if not tries:
        raise SimulationError(f"{schedule} on {machine.name}: {reasons[0]}")
    return min(tries, key=lambda e: e.total_us)


def _mailbox(machine: Machine) -> Machine:
    kept = _MAILBOXES.get(id(machine))
    if kept is None or kept[0] is not machine:
        kept = _MAILBOXES[id(machine)] = (machine, simulate_own.mailbox_machine(machine))
    return kept[1]


def own_best(
    machine: Machine,
    rows: int,
    hidden: int,
    ranks: Sequence[int] | None = None,
    costs: Costs = COSTS,
) -> Estimate:
    """The fastest of the plugin's schedules that can serve this machine."""
    taking = tuple(range(machine.world) if ranks is None else ranks)
    tries = []
    for name in own_names():
        try:
            tries.append(own(machine, name, rows, hidden, taking, costs))
        except SimulationError:
            continue
    if not tries:
        raise SimulationError(f"{machine.name}: none of the plugin's schedules can serve it")
    return min(tries, key=lambda e: e.total_us)


def applicable(machine: Machine, ranks: Sequence[int]) -> tuple[str, ...]:
    """Own schedules and rivals that make sense on this machine, for a table of all."""
    options = simulate_own.partitions(machine, ranks)
    mine = [
        n
        for n in own_names()
        if not all(simulate_own.refusal(machine, n, ranks, islands) for islands in options)
    ]
    islands = rivals.islands_of(machine, ranks)
    theirs = ["nccl-ll", "nccl-simple", "one-shot-push", "one-shot-pull", "staged-push"]
    if len(islands) > 1:
        theirs += ["island-pull", "leader-pull"]
    return (*mine, *theirs)


def any_method(
    machine: Machine,
    method: str,
    rows: int,
    hidden: int,
    ranks: Sequence[int],
    costs: Costs = COSTS,
) -> Estimate:
    """An own schedule (with `costs`) or a rival, by name.

    Raises:
        SimulationError: no such schedule, or it cannot serve this machine.
    """
    if method in own_names():
        return own(machine, method, rows, hidden, ranks, costs)
    if method not in methods():
        raise SimulationError(
            f"no schedule {method!r}: own are {', '.join(own_names())}; rivals {', '.join(methods())}"
        )
    return rival(machine, method, rows * hidden * 2, ranks)
