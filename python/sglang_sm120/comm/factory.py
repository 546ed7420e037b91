"""Build the communicator of one group: every rank of the group gets one, or every rank declines.

All exchange goes through the group's CPU (gloo) process group, once, at start. A rank that cannot take part says
so in the same exchange, so that no rank is left waiting and no rank serves alone.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_sm120.comm.communicator import Communicator
from sglang_sm120.options import OptionError, Options, to_dict

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from sglang_sm120.comm.candidates import Baseline

logger = logging.getLogger(__name__)

# Backend -> "module:function" of its builder, `(spec: GroupSpec) -> Communicator`, which raises `Declined`.
BACKENDS: dict[str, str] = {
    "host": "sglang_sm120.comm.factory:build_host",
    "native": "sglang_sm120.comm.native_build:build",
    "mailbox": "sglang_sm120.comm.mailbox:build",
    "flashinfer": "sglang_sm120.comm.flashinfer:build",
}
# Backends that may compete with the one that was built, where the user named none.
EXTRAS: dict[str, dict[str, str]] = {
    "native": {
        "mailbox": "sglang_sm120.comm.mailbox:build",
        "flashinfer": "sglang_sm120.comm.flashinfer:build_compiled",
    },
    "mailbox": {},
    "host": {},
}


class Declined(RuntimeError):
    """A backend cannot serve this group; the text says why, without the rank (the factory adds it)."""


class RanksApart(RuntimeError):
    """A rank left a builder by an error between two exchanges of the builder's own; no rank can go on."""


# Begins every exchange of this file, so that one of a builder is never taken for it.
_MARK = "sm120-factory"


@dataclass(frozen=True)
class Peer:
    """Where one rank of the group runs; enough to know whether it can be reached and watched."""

    rank: int
    pid: int
    hostname: str
    machine: str
    pid_namespace: str
    gpu: str = ""

    @classmethod
    def here(cls, rank: int, device: torch.device | None = None) -> Peer:
        gpu = _gpu_uuid(device) if device is not None and device.type == "cuda" else ""
        return cls(rank, os.getpid(), socket.gethostname(), _machine(), _pid_namespace(), gpu)


@dataclass(frozen=True)
class GroupSpec:
    """Everything a backend needs to build one rank's communicator.

    Attributes:
        name: SGLang's name of the group ("tp", "attention_tp", "moe_tp", ...).
        session: text that is the same on all ranks of this group and unique on this machine.
        device: where the tensors live.
        process_group: gloo group of exactly these ranks, for exchange at start only.
        peers: all ranks, in order.
        islands: partition of the ranks, the same on all of them; None is one island.
    """

    name: str
    rank: int
    world: int
    session: str
    device: torch.device
    process_group: ProcessGroup
    options: Options
    peers: tuple[Peer, ...] = field(repr=False)
    islands: tuple[tuple[int, ...], ...] | None = None

    @property
    def capacity_bytes(self) -> int:
        return self.options.capacity_mib << 20


@dataclass(frozen=True)
class Outcome:
    """What the group decided, the same on every rank.

    Attributes:
        communicator: this rank's part, or None when the group declined.
        reason: one line: what serves the group, or why nothing of ours does.
    """

    communicator: Communicator | None
    backend: str
    reason: str
    peers: tuple[Peer, ...] = ()
    session: str = ""


def choose_backends(options: Options, device_type: str) -> tuple[str, ...]:
    """Backends to try, in order: the one asked for, or for auto those made for the device."""
    if options.backend != "auto":
        return (options.backend,)
    return ("native", "mailbox") if device_type == "cuda" else ("host",)


def build(
    name: str,
    process_group: ProcessGroup,
    device: torch.device,
    options: Options,
    *,
    baseline: Baseline | None = None,
    backends: dict[str, str] | None = None,
) -> Outcome:
    """Build this rank's communicator, or decline on every rank alike.

    Collective over `process_group`: every rank calls it with the same options.

    Args:
        name: SGLang's name of the group.
        process_group: gloo group of the ranks that sum together.
        device: where this rank's tensors live.
        options: the same on every rank.
        baseline: how SGLang would sum a tensor of this group, for the plan of a GPU group to beat.
        backends: builders to use in place of `BACKENDS`, for tests.

    Raises:
        RanksApart: a builder failed on some ranks where the others waited for them.
    """
    import torch.distributed as dist

    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    wanted = choose_backends(options, device.type)
    if wanted == ("nccl",):
        return Outcome(None, "nccl", "--sm120-backend nccl leaves every sum to SGLang and NCCL")

    step = 0

    def exchange(value: Any) -> list[Any]:
        nonlocal step
        step += 1
        told: list[Any] = [None] * world
        dist.all_gather_object(told, (_MARK, step, value), group=process_group)
        apart = [r for r, t in enumerate(told) if type(t) is not tuple or t[:2] != (_MARK, step)]
        if apart:
            raise RanksApart(
                f'rank {rank} of group "{name}" is not at the same step as ranks {apart}: one of them failed alone '
                f"(this rank was about to tell {repr(value)[:300]})"
            )
        return [entry[2] for entry in told]

    # One exchange carries who is where, and rank 0's session id.
    told = exchange((Peer.here(rank, device), f"{os.getpid()}-{secrets.token_hex(4)}", options))
    peers = tuple(peer for peer, _, _ in told)
    complaint = _joint_complaint(name, told)
    if complaint:
        return Outcome(None, wanted[0], complaint, peers)
    islands = exchange(_islands(name, options, peers) if rank == 0 else None)[0]
    builders = BACKENDS if backends is None else backends
    failures = []
    for backend in wanted:
        session = f"{name}-{backend}-{told[0][1]}"
        spec = GroupSpec(name, rank, world, session, device, process_group, options, peers, islands)
        communicator, error = _try_build(spec, builders[backend])
        failed = [f"rank {r}: {e}" for r, e in enumerate(exchange(error)) if e is not None]
        if not failed and communicator is not None:
            communicator = _behind_a_plan(spec, communicator, backend, exchange, baseline)
            reason = f'backend "{backend}" is ready for group "{name}"; a measured plan says what it serves'
            return Outcome(communicator, backend, reason, peers, session)
        if communicator is not None:
            communicator.close()
        failures.append(f'backend "{backend}" is off for group "{name}" ({"; ".join(failed)})')
    return Outcome(None, wanted[0], "; ".join(failures), peers)


def _joint_complaint(name: str, told: list[Any]) -> str | None:
    if len({peer.machine for peer, _, _ in told}) > 1:
        shown = ", ".join(sorted({peer.hostname for peer, _, _ in told}))
        return f'group "{name}" spans several machines ({shown}); its sums stay with SGLang'
    settings = [to_dict(options) for _, _, options in told]
    for rank, theirs in enumerate(settings):
        for option, value in theirs.items():
            if value != settings[0][option]:
                return (
                    f'ranks of group "{name}" were started with different sm120 options ({option}: rank 0 has '
                    f"{settings[0][option]!r}, rank {rank} has {value!r}); use the same on all"
                )
    return None


def _try_build(spec: GroupSpec, builder: str) -> tuple[Communicator | None, str | None]:
    # Any error must reach the other ranks as a text, or they would wait for this one.
    try:
        if spec.name == "tp":
            spec.options.check_world(spec.world)
        module, _, function = builder.partition(":")
        build_one: Callable[[GroupSpec], Communicator] = getattr(
            importlib.import_module(module), function
        )
        return build_one(spec), None
    except (Declined, OptionError) as declined:
        return None, str(declined)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _islands(
    name: str, options: Options, peers: tuple[Peer, ...]
) -> tuple[tuple[int, ...], ...] | None:
    """The user's islands, or for auto the ranks by the switch or socket of their GPUs; None is one island."""
    if options.islands != "auto":
        return options.island_ranks if name == "tp" else None
    rank_of = {peer.gpu: peer.rank for peer in peers if peer.gpu}
    if len(rank_of) < len(peers):
        return None
    from sglang_sm120.fabric.source import Live
    from sglang_sm120.fabric.topology import discover

    topology = discover(Live())
    uuid_of = {gpu.index: gpu.uuid for gpu in topology.gpus}
    found = [
        tuple(sorted(rank_of[uuid_of[i]] for i in island if uuid_of[i] in rank_of))
        for island in topology.islands()
    ]
    islands = tuple(sorted(island for island in found if island))
    complete = sorted(rank for island in islands for rank in island) == sorted(rank_of.values())
    # One island, or islands of one rank each, are the flat case.
    return islands if complete and 1 < len(islands) < len(peers) else None


def _behind_a_plan(
    spec: GroupSpec,
    inner: Communicator,
    backend: str,
    exchange: Callable[[Any], list[Any]],
    baseline: Baseline | None,
) -> Communicator:
    # Nothing serves before it was checked and measured on this very machine.
    from sglang_sm120.comm import plan_cache, start
    from sglang_sm120.comm.counters import process_counters
    from sglang_sm120.fabric import islands as isl
    from sglang_sm120.fabric.versions import installed

    options = spec.options
    named = options.backend != "auto"
    setting = start.Setting(
        gpus=tuple(peer.gpu or f"cpu of {peer.machine}" for peer in spec.peers),
        hosts=tuple(peer.machine for peer in spec.peers),
        versions=installed(),
        islands=spec.islands or isl.flat(spec.world),
        options=f"wire={options.wire} capacity={options.capacity_mib}",
        pin=backend if named else "",
        force=named,
        environ=os.environ,
        cache=plan_cache.folder(options.plan_cache),
        kernel=platform.release(),
    )
    if spec.device.type == "cuda":
        driver = start.gpu_edges(
            spec.rank, spec.world, exchange, spec.device, mailbox=backend == "mailbox"
        )
    else:
        driver = start.host_edges(spec.rank, spec.world, exchange, f"probe-{spec.session}")
    return start.planned(
        inner,
        backend,
        setting,
        device=spec.device,
        exchange=exchange,
        baseline=baseline,
        driver=driver,
        counters=process_counters(),
        extras={} if named else _extras(spec, backend, exchange),
    )


def _extras(
    spec: GroupSpec, backend: str, exchange: Callable[[Any], list[Any]]
) -> dict[str, Callable[[], Communicator | None]]:
    def maker(name: str, builder: str) -> Callable[[], Communicator | None]:
        def make() -> Communicator | None:
            communicator, error = _try_build(spec, builder)
            failed = [f"rank {r}: {e}" for r, e in enumerate(exchange(error)) if e is not None]
            if not failed:
                return communicator
            if communicator is not None:
                communicator.close()
            if spec.rank == 0:
                logger.info("%s does not compete in group %s: %s", name, spec.name, failed[0])
            return None

        return make

    return {name: maker(name, builder) for name, builder in EXTRAS[backend].items()}


def build_host(spec: GroupSpec) -> Communicator:
    """The CPU engine over shared memory; ranks are processes of one machine.

    Raises:
        Declined: the tensors are not on the CPU.
    """
    if spec.device.type != "cpu":
        raise Declined(
            f"the host backend sums CPU tensors, and this rank computes on {spec.device}"
        )
    from sglang_sm120.comm.host import HostCommunicator

    return HostCommunicator(
        spec.name,
        spec.rank,
        spec.world,
        session=spec.session,
        islands=spec.islands,
        capacity_bytes=spec.capacity_bytes,
        timeout_ms=spec.options.warmup_timeout_ms,
        wire="lossless" if spec.options.wire == "bf16" else spec.options.wire,
    )


def _machine() -> str:
    # The boot id tells two machines with one name apart, and is the same in all containers of one machine.
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _gpu_uuid(device: torch.device) -> str:
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
