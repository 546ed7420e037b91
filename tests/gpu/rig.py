"""Virtual ranks: several communicators of one process on one GPU, each with its own slab and stream.

The kernels of all ranks must be resident at once; the rig launches them back to back and never waits between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang_sm120.comm.cuda_library import cuda_library
from sglang_sm120.comm.native import NativeCommunicator
from sglang_sm120.comm.native_how import How
from sglang_sm120.comm.slab import Slabs

T = TypeVar("T")
CONTROL_BYTES = 64 << 10  # kControlBytes of csrc/core/layout.h
GUARD_BYTES, GUARD = 256 << 10, 0x5A  # behind every slab: nobody may write there


class _Memory:
    """Device memory that torch did not allocate, as `torch.as_tensor` takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _all(results: Sequence[T | None]) -> list[T]:
    assert all(result is not None for result in results)
    return [result for result in results if result is not None]


class VirtualGroup:
    """`world` ranks on one GPU.

    With `way` "host" the kernels do what they do for slabs in host memory, over device memory all the same.
    """

    def __init__(
        self,
        world: int,
        *,
        islands: str | None = None,
        capacity_bytes: int = 4 << 20,
        timeout_ms: int = 1000,
        way: str = "ipc",
        relay: bool = False,
        **options: Any,
    ) -> None:
        self.world = world
        self.lib = cuda_library()
        small = min(capacity_bytes, max(capacity_bytes * 2 // world, 64 << 10))
        self.tile_bytes = self.lib.cuda_slab_bytes(world, islands or "", capacity_bytes, small)
        nbytes = self.tile_bytes + (self.lib.cuda_relay_bytes(capacity_bytes) if relay else 0)
        self.nbytes = nbytes
        self.slabs = [self.lib.slab_ipc_allocate(nbytes + GUARD_BYTES) for _ in range(world)]
        for rank in range(world):
            self.guard(rank).fill_(GUARD)
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        self.ranks = [
            NativeCommunicator(
                "virtual",
                rank,
                world,
                lambda mine: [mine] * world,
                islands=islands,
                capacity_bytes=capacity_bytes,
                timeout_ms=timeout_ms,
                relay=relay,
                early_launch=True,  # nothing else runs on this GPU
                slabs=Slabs(list(self.slabs), nbytes, way),
                **options,
            )
            for rank in range(world)
        ]

    def each(
        self, call: Callable[[NativeCommunicator, int], T], skip: Sequence[int] = ()
    ) -> list[T | None]:
        """Run `call(communicator, rank)` for every rank on its own stream; returns after all have ended."""
        now = torch.cuda.current_stream()
        results: list[T | None] = []
        for rank, communicator in enumerate(self.ranks):
            if rank in skip:
                results.append(None)
                continue
            self.streams[rank].wait_stream(now)
            with torch.cuda.stream(self.streams[rank]):
                results.append(call(communicator, rank))
        torch.cuda.synchronize()
        return results

    def sum(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Every rank's all-reduce of its part."""
        return _all(self.each(lambda c, r: c.all_reduce(parts[r])))

    def norm(
        self,
        parts: Sequence[torch.Tensor],
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        gemma: bool = False,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every rank's (normed, residual_out)."""
        return _all(
            self.each(
                lambda c, r: c.all_reduce_rmsnorm(parts[r], residual, weight, eps, gemma=gemma)
            )
        )

    def fp8(
        self,
        parts: Sequence[torch.Tensor],
        residual: torch.Tensor,
        weight: torch.Tensor,
        group: int,
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Every rank's (codes, scales, residual_out)."""
        return _all(
            self.each(
                lambda c, r: c.all_reduce_rmsnorm_fp8(parts[r], residual, weight, 1e-6, group=group)
            )
        )

    def pin(self, op: Any, rows: int, how: How | None) -> None:
        for communicator in self.ranks:
            communicator.pin(op, rows, how)

    def slots(self, rank: int) -> torch.Tensor:
        """A rank's three slots as uint8 [3, bytes of a slot], without a copy."""
        memory = _Memory(self.slabs[rank] + CONTROL_BYTES, self.tile_bytes - CONTROL_BYTES)
        return torch.as_tensor(memory, device="cuda").view(3, -1)

    def guard(self, rank: int) -> torch.Tensor:
        """The bytes behind a rank's slab, uint8, without a copy."""
        return torch.as_tensor(_Memory(self.slabs[rank] + self.nbytes, GUARD_BYTES), device="cuda")

    def dirty(self, rank: int) -> int:
        """Bytes that are not clear outside the slot of the last call, or overwritten behind the slab: none, after any call."""
        last = (sum(self.ranks[rank].calls.values()) - 1) % 3
        slots = self.slots(rank)
        stale = sum(int((slots[i] != 0xFF).sum()) for i in range(3) if i != last)
        return stale + int((self.guard(rank) != GUARD).sum())

    def recover(self) -> None:
        torch.cuda.synchronize()
        for communicator in self.ranks:
            communicator.recover(lambda mine: [mine] * self.world)

    def close(self) -> None:
        torch.cuda.synchronize()
        for communicator in self.ranks:
            communicator.close()
        for address in self.slabs:
            self.lib.slab_ipc_release(address)

    def __enter__(self) -> VirtualGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def canonical_sum(
    parts: Sequence[torch.Tensor],
    islands: Sequence[Sequence[int]] | None = None,
    fp32_partials: bool = False,
) -> torch.Tensor:
    """The scalar reference: fp32, ranks ascending inside an island, islands ascending, one final rounding."""
    dtype = parts[0].dtype
    islands = islands or [range(len(parts))]
    total = None
    for island in sorted(islands, key=min):
        members = sorted(island)
        part = parts[members[0]].float()
        for rank in members[1:]:
            part = part + parts[rank].float()
        if len(islands) > 1 and not fp32_partials:
            part = part.to(dtype).float()
        total = part if total is None else total + part
    assert total is not None
    return total.to(dtype)


def reference_norm(
    total: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gemma: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed in fp64, residual_out) as `Communicator.all_reduce_rmsnorm` documents them."""
    residual_out = (total.float() + residual.float()).to(total.dtype)
    y = residual_out.double()
    scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    w = weight.double() + (1.0 if gemma else 0.0)
    return y * scale * w, residual_out


def ulps(got: torch.Tensor, exact: torch.Tensor) -> int:
    """Largest distance, in units of the dtype's last place, between `got` and `exact` rounded to its dtype."""
    kind = torch.int32 if got.dtype == torch.float32 else torch.int16
    a, b = got.contiguous().view(kind).long(), exact.to(got.dtype).contiguous().view(kind).long()
    lowest = torch.iinfo(kind).min
    a, b = torch.where(a < 0, lowest - a, a), torch.where(b < 0, lowest - b, b)
    return int((a - b).abs().max())


def inputs(
    world: int, rows: int, hidden: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """(one contribution per rank, residual, weight), random, on the GPU."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    parts = [
        torch.randn(rows, hidden, generator=g, device="cuda").mul(1.0 + r).to(dtype)
        for r in range(world)
    ]
    residual = torch.randn(rows, hidden, generator=g, device="cuda").mul(3).to(dtype)
    weight = torch.randn(hidden, generator=g, device="cuda").to(dtype)
    return parts, residual, weight
