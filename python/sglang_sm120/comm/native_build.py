"""Building the native communicator for a group of SGLang's: all ranks together, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_sm120.comm import slab
from sglang_sm120.comm.communicator import CollectiveError, Communicator
from sglang_sm120.comm.native import NativeCommunicator

if TYPE_CHECKING:
    from sglang_sm120.comm.factory import GroupSpec


def process_group_exchange(process_group: Any) -> slab.Exchange:
    """All-gather of Python objects over a gloo process group."""
    import torch.distributed as dist

    def exchange(value: Any) -> list[Any]:
        told: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(told, value, group=process_group)
        return told

    return exchange


def build(spec: GroupSpec) -> Communicator:
    """The builder that `comm.factory` calls.

    Raises:
        Declined: no CUDA device, too many peers for a flat group, no library, or slabs cannot be shared.
    """
    return build_over(spec, slab.PEER_WAYS, -1)


def build_over(
    spec: GroupSpec,
    ways: Sequence[str],
    numa_node: int,
    largest_bytes: int | None = None,
    relay: bool = False,
) -> NativeCommunicator:
    """Build over some ways of sharing; the mailbox backend asks for pinned host memory."""
    from sglang_sm120.comm.cuda_library import CudaLibraryMissing, cuda_library
    from sglang_sm120.comm.factory import Declined

    exchange = process_group_exchange(spec.process_group)
    error: str | None = None
    try:
        if spec.device.type != "cuda":
            raise Declined(
                f"the GPU kernels need CUDA tensors, and this rank computes on {spec.device}"
            )
        if not 2 <= spec.world <= 16:
            raise Declined(f"the GPU kernels serve 2 to 16 ranks, not {spec.world}")
        cuda_library()
    except (Declined, CudaLibraryMissing) as problem:
        error = str(problem)
    # Told together, because the next step waits for every rank.
    if any(exchange(error)):
        raise Declined(error or "another rank declined")
    try:
        return NativeCommunicator(
            spec.name,
            spec.rank,
            spec.world,
            exchange,
            islands=spec.islands,
            capacity_bytes=spec.capacity_bytes,
            timeout_ms=spec.options.timeout_ms,
            warmup_timeout_ms=spec.options.warmup_timeout_ms,
            wire="lossless" if spec.options.wire == "bf16" else spec.options.wire,
            ways=ways,
            numa_node=numa_node,
            largest_bytes=largest_bytes,
            relay=relay,
        )
    except (slab.SlabError, CollectiveError) as problem:
        raise Declined(str(problem)) from None
