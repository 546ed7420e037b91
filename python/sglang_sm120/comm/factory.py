"""Build the communicator of one group: every rank of the group gets one, or every rank declines.

All exchange goes through the group's CPU (gloo) process group, once, at start. A rank that cannot take part says
so in the same exchange, so that no rank is left waiting and no rank serves alone.
"""

from __future__ import annotations

import importlib
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_sm120.comm.communicator import Communicator
from sglang_sm120.options import OptionError, Options

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# Backend -> "module:function" of its builder, `(spec: GroupSpec) -> Communicator`, which raises `Declined`.
BACKENDS: dict[str, str] = {
    "host": "sglang_sm120.comm.factory:build_host",
    "native": "sglang_sm120.comm.native:build",
    "mailbox": "sglang_sm120.comm.mailbox:build",
    "flashinfer": "sglang_sm120.comm.flashinfer:build",
}


class Declined(RuntimeError):
    """A backend cannot serve this group; the text says why, without the rank (the factory adds it)."""


@dataclass(frozen=True)
class Peer:
    """Where one rank of the group runs; enough to know whether it can be reached and watched."""

    rank: int
    pid: int
    hostname: str
    machine: str
    pid_namespace: str

    @classmethod
    def here(cls, rank: int) -> Peer:
        return cls(rank, os.getpid(), socket.gethostname(), _machine(), _pid_namespace())


@dataclass(frozen=True)
class GroupSpec:
    """Everything a backend needs to build one rank's communicator.

    Attributes:
        name: SGLang's name of the group ("tp", "attention_tp", "moe_tp", ...).
        session: text that is the same on all ranks of this group and unique on this machine.
        device: where the tensors live.
        process_group: gloo group of exactly these ranks, for exchange at start only.
        peers: all ranks, in order.
    """

    name: str
    rank: int
    world: int
    session: str
    device: torch.device
    process_group: ProcessGroup
    options: Options
    peers: tuple[Peer, ...] = field(repr=False)

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


def choose_backend(options: Options, device_type: str) -> str:
    """The backend that serves a device: the one asked for, or for auto the one made for that device."""
    if options.backend != "auto":
        return options.backend
    return "native" if device_type == "cuda" else "host"


def build(
    name: str,
    process_group: ProcessGroup,
    device: torch.device,
    options: Options,
    *,
    backends: dict[str, str] | None = None,
) -> Outcome:
    """Build this rank's communicator, or decline on every rank alike.

    Collective over `process_group`: every rank calls it with the same options.

    Args:
        name: SGLang's name of the group.
        process_group: gloo group of the ranks that sum together.
        device: where this rank's tensors live.
        options: the same on every rank.
        backends: builders to use in place of `BACKENDS`, for tests.
    """
    import torch.distributed as dist

    rank = dist.get_rank(process_group)
    world = dist.get_world_size(process_group)
    backend = choose_backend(options, device.type)
    if backend == "nccl":
        return Outcome(None, backend, "--sm120-backend nccl leaves every sum to SGLang and NCCL")

    # One exchange carries who is where, and rank 0's session id.
    mine = (Peer.here(rank), f"{os.getpid()}-{secrets.token_hex(4)}", options)
    told: list[Any] = [None] * world
    dist.all_gather_object(told, mine, group=process_group)
    peers = tuple(peer for peer, _, _ in told)
    session = f"{name}-{told[0][1]}"
    complaint = _joint_complaint(name, told)
    if complaint:
        return Outcome(None, backend, complaint, peers)

    spec = GroupSpec(name, rank, world, session, device, process_group, options, peers)
    communicator, error = _try_build(spec, (BACKENDS if backends is None else backends)[backend])
    errors: list[Any] = [None] * world
    dist.all_gather_object(errors, error, group=process_group)
    failed = [f"rank {r}: {text}" for r, text in enumerate(errors) if text is not None]
    if failed:
        if communicator is not None:
            communicator.close()
        return Outcome(
            None,
            backend,
            f'backend "{backend}" is off for group "{name}" ({"; ".join(failed)})',
            peers,
        )
    return Outcome(
        communicator, backend, f'backend "{backend}" serves group "{name}"', peers, session
    )


def _joint_complaint(name: str, told: list[Any]) -> str | None:
    if len({peer.machine for peer, _, _ in told}) > 1:
        shown = ", ".join(sorted({peer.hostname for peer, _, _ in told}))
        return f'group "{name}" spans several machines ({shown}); its sums stay with SGLang'
    settings = {options for _, _, options in told}
    if len(settings) > 1:
        return f'ranks of group "{name}" were started with different sm120 options; use the same on all'
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
        islands=spec.options.island_ranks if spec.name == "tp" else None,
        capacity_bytes=spec.capacity_bytes,
        timeout_ms=spec.options.warmup_timeout_ms,
        wire="lossless" if spec.options.wire == "bf16" else spec.options.wire,
    )


def _machine() -> str:
    # The boot id tells two machines with one name apart, and is the same in all containers of one machine.
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
