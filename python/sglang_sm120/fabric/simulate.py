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

from sglang_sm120.fabric import rivals
from sglang_sm120.fabric.machine import Machine
from sglang_sm120.fabric.simulate_engine import HopTime, LinkUse, Network, run


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


# Machines are mutable structs without a hash, so networks are kept by identity.
_NETWORKS: dict[tuple[int, tuple[int, ...], float, float], tuple[Machine, Network]] = {}


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


@lru_cache(maxsize=1)
def methods() -> tuple[str, ...]:
    """Names of all rival models."""
    return ("nccl", *rivals.RIVALS)
