"""The native backend: our CUDA kernels over slabs that every rank has mapped."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from sglang_sm120.comm import flight, slab
from sglang_sm120.comm.communicator import CollectiveError, Communicator, Op, norm_inputs
from sglang_sm120.comm.native_how import NUMBERED, RELAYS, Group, How, spread
from sglang_sm120.comm.schedule import SCHEDULES, islands_text

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Device(NamedTuple):
    """What ranks tell each other about their GPUs; `problem` is why this rank's channel could not be opened."""

    uuid: str
    multiprocessors: int
    major: int
    problem: str


class NativeCommunicator(Communicator):
    """One rank's part of a group whose tensors live on GPUs that can write to each other.

    Construction is collective and fails on every rank alike. Calls never wait on the host, may be captured in
    CUDA graphs, and may come from any stream: a call from another stream than the last one's waits for it.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        exchange: slab.Exchange,
        *,
        islands: str | Sequence[Sequence[int]] | None = None,
        capacity_bytes: int = 1 << 20,
        timeout_ms: int = 2000,
        warmup_timeout_ms: int | None = None,
        wire: str = "lossless",
        fp32_partials: bool = False,
        schedule: str = "auto",
        ways: Sequence[str] = slab.PEER_WAYS,
        numa_node: int = -1,
        channel: int = 0,
        largest_bytes: int | None = None,
        relay: bool = False,
        early_launch: bool | None = None,
        library: Any = None,
        slabs: slab.Slabs | None = None,
    ) -> None:
        """Allocate, share and clear the slabs.

        Args:
            exchange: all-gather of a Python object over the group.
            islands: partition of the ranks, as text ("0-3;4-7") or lists; None is one island.
            capacity_bytes: largest message, rows x hidden rounded up to tiles of 256 elements.
            timeout_ms: longest wait for a missing rank within a call; a captured call keeps it.
            warmup_timeout_ms: the same for calls outside graphs until `set_timeout_ms`; `timeout_ms` if None.
            wire: "lossless" or "int8" (blocks of 32 with a shared exponent).
            fp32_partials: islands exchange fp32 (one rounding) rather than the dtype.
            schedule: "auto" or a name in `SCHEDULES` or, with `relay`, in `RELAYS`.
            ways: how slabs may be shared, see `slab.share`.
            channel: number of this channel, for error texts.
            largest_bytes: the schedules that travel in tiles decline larger calls (rows x hidden x item size); None
                is no such limit.
            relay: slabs also hold the relay's outboxes, and calls beyond `largest_bytes` take the relay. For slabs in
                host memory (`way` "host"), one island and a lossless wire.
            early_launch: allow it at all; by default where no other rank shares the GPU. Kernels that were
                scheduled early wait in the multiprocessors, and may keep out what another rank waits for.
            library, slabs: given by tests that put several ranks into one process.

        Raises:
            slab.SlabError: slabs cannot be shared, on every rank.
            CollectiveError: the ranks disagree about the configuration, or one cannot open its channel; on every rank.
        """
        super().__init__(name, rank, world)
        known = NUMBERED if relay else SCHEDULES
        if schedule != "auto" and schedule not in known:
            raise ValueError(f"schedule {schedule!r} is not auto or one of {', '.join(known)}")
        if wire not in ("lossless", "int8"):
            raise ValueError(f"wire {wire!r} is not lossless or int8")
        self._islands = islands_text(islands)
        self._flags = (1 if wire == "int8" else 0) | (2 if fp32_partials else 0)
        self._schedule = schedule
        self._bounds = (timeout_ms, warmup_timeout_ms or timeout_ms)  # captured, eager
        self._bound = timeout_ms
        self._small = min(capacity_bytes, max(capacity_bytes * 2 // world, 64 << 10))
        self._largest = largest_bytes
        self._relay = relay and wire == "lossless" and ";" not in self._islands
        self._handle = 0
        self._hows: dict[tuple[Op, int], How] = {}
        self._stream: torch.cuda.Stream | None = None
        if library is None:
            from sglang_sm120.comm.cuda_library import cuda_library

            library = cuda_library()
        self._lib = library
        mine = (
            world,
            self._islands,
            capacity_bytes,
            timeout_ms,
            self._flags,
            schedule,
            self._relay,
        )
        told = exchange(mine)
        if len(set(told)) > 1:
            shown = "; ".join(f"rank {r}: {entry}" for r, entry in enumerate(told))
            raise CollectiveError(f"{name}: ranks differ in their configuration ({shown})")
        if slabs is None:
            nbytes = library.cuda_slab_bytes(world, self._islands, capacity_bytes, self._small)
            if self._relay:
                nbytes += library.cuda_relay_bytes(capacity_bytes)
            if nbytes >= 1 << 32:
                raise slab.SlabError(
                    f"{name}: a capacity of {capacity_bytes >> 20} MiB makes slabs of {nbytes >> 20} MiB, which must be "
                    "below 4096: lower --sm120-capacity-mib"
                )
            slabs = slab.share(
                library, exchange, rank, world, nbytes, ways=ways, numa_node=numa_node
            )
        self._slabs = slabs
        problem = ""
        try:
            self._handle = library.cuda_open(
                rank,
                world,
                self._islands,
                capacity_bytes,
                self._small,
                timeout_ms,
                channel,
                slabs.way in slab.HOST_WAYS,
                self._relay,
                slabs.addresses,
            )
        except Exception as error:  # told to all below: the others wait for this rank there
            problem = str(error)
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        own = Device(str(getattr(gpu, "uuid", rank)), gpu.multi_processor_count, gpu.major, problem)
        devices = exchange(own)  # and nobody pushes before all slabs are clear
        broken = [
            f"rank {r}: {device.problem}" for r, device in enumerate(devices) if device.problem
        ]
        if broken:
            self.close()
            slabs.close()
            raise CollectiveError(f"{name}: a channel could not be opened ({'; '.join(broken)})")
        # Ranks that share a GPU must all be resident at once, this call's kernels and the next ones. The least of GPUs
        # of several kinds counts for all, for a call must run alike on every rank.
        crowd = max(Counter(device.uuid for device in devices).values())
        multiprocessors = min(device.multiprocessors for device in devices)
        self._early = crowd == 1 if early_launch is None else early_launch
        self._crowded = crowd * 16 * 2 > multiprocessors
        self._group = Group(
            world=world,
            islands=self._islands,
            lossless=wire == "lossless",
            roomy=crowd * 32 * 2 <= multiprocessors,
            relay=self._relay,
            small=self._small,
        )
        self._clusters = min(device.major for device in devices) >= 9
        library.cuda_set_crowded(self._handle, self._crowded)
        self._admits = lru_cache(maxsize=4096)(self._admits_uncached)

    # --- what runs -----------------------------------------------------------------------------------

    @property
    def way(self) -> str:
        """How the slabs are shared: "vmm", "ipc" or "host"."""
        return self._slabs.way

    def pin(self, op: Op, rows: int, how: How | None) -> None:
        """Fix how calls of `op` with `rows` rows run (None: back to the default). Alike on every rank."""
        if how is None:
            self._hows.pop((op, rows), None)
        else:
            self._hows[op, rows] = how
        self._admits.cache_clear()

    def ways(self, op: Op) -> Sequence[tuple[str, int]]:
        return self._group.ways()

    def choose(self, op: Op, rows: int, hidden: int, schedule: str, ctas: int = 0) -> None:
        if not schedule:
            self.pin(op, rows, None)
            return
        how = How(schedule, ctas=ctas)
        if ctas and schedule not in RELAYS:
            norm = op is not Op.ALL_REDUCE
            how = How(
                schedule,
                *spread(
                    rows, hidden, ctas, norm=norm, clusters=self._clusters, crowded=self._crowded
                ),
            )
        self.pin(op, rows, how)

    def how(self, op: Op, rows: int, hidden: int, itemsize: int) -> How:
        """How a call runs: pinned, as the constructor was told, or by default (`native_how.Group.default`)."""
        pinned = self._hows.get((op, rows))
        if pinned is not None:
            return pinned
        if self._schedule != "auto":
            return How(self._schedule)
        return self._group.default(rows * hidden * itemsize, self._largest)

    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        return self._handle != 0 and dtype in _DTYPES and self._admits(op, rows, hidden, dtype)

    def _admits_uncached(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        how = self.how(op, rows, hidden, dtype.itemsize)
        large = self._largest is not None and rows * hidden * dtype.itemsize > self._largest
        if large and how.schedule not in RELAYS:
            return False
        schedule = NUMBERED.index(how.schedule)
        return bool(
            self._lib.cuda_admits(
                self._handle, schedule, _DTYPES[dtype], rows, hidden, bool(self._flags & 1)
            )
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = _aligned(x.contiguous())
        out = torch.empty_like(x)
        how = self._begin(Op.ALL_REDUCE, x)
        self._lib.cuda_all_reduce(self._handle, how, x, out, self._current_stream())
        return out

    def all_reduce_rmsnorm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        gemma: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, weight = map(_aligned, norm_inputs(x, residual, weight))
        out = torch.empty_like(x)
        residual_out = torch.empty_like(x)
        how = self._begin(Op.ALL_REDUCE_RMSNORM, x)
        self._lib.cuda_all_reduce_rmsnorm(
            self._handle, how, x, residual, weight, eps, gemma, out, residual_out, 0, None,
            self._current_stream(),
        )  # fmt: skip
        return out, residual_out

    def all_reduce_rmsnorm_fp8(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        gemma: bool = False,
        group: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `all_reduce_rmsnorm`, then quantise to FP8 E4M3: scale = amax / 448, code = e4m3(normed / scale).

        Args:
            group: 0 for one scale per row, 128 for one per 128 elements (hidden must be a multiple of it).

        Returns:
            (codes [rows, hidden] float8_e4m3fn, scales fp32 [rows, 1] or [rows, hidden / 128],
            residual_out [rows, hidden]).

        Raises:
            CollectiveError: as for `all_reduce`.
            ValueError: another group size.
        """
        x, residual, weight = map(_aligned, norm_inputs(x, residual, weight))
        hidden = x.shape[-1]
        if group not in (0, 128) or (group and hidden % group):
            raise ValueError(
                f"group {group} must be 0, or 128 with hidden {hidden} a multiple of it"
            )
        scales = torch.empty(
            (*x.shape[:-1], hidden // group if group else 1), dtype=torch.float32, device=x.device
        )
        codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        residual_out = torch.empty_like(x)
        how = self._begin(Op.ALL_REDUCE_RMSNORM_FP8, x)
        # DLPack has no common name for E4M3: the kernel takes the bytes.
        self._lib.cuda_all_reduce_rmsnorm(
            self._handle, how, x, residual, weight, eps, gemma, codes.view(torch.uint8), residual_out,
            2 if group else 1, scales, self._current_stream(),
        )  # fmt: skip
        return codes, scales, residual_out

    def prefetch_in_next(self, chunks: torch.Tensor, first: int, count: int, ctas: int) -> None:
        self._lib.cuda_prefetch_in_next(self._handle, chunks, first, count, ctas)

    def _begin(self, op: Op, x: torch.Tensor) -> list[int]:
        if self._handle == 0:
            raise CollectiveError(f"{self.name}: the communicator of rank {self.rank} is closed")
        self.check()
        captured, eager = self._bounds
        if captured != eager or self._bound != eager:
            self._use_bound(captured if torch.cuda.is_current_stream_capturing() else eager)
        self.calls[op] += 1
        how = self.how(op, x.numel() // x.shape[-1], x.shape[-1], x.element_size())
        flags = self._flags | (0 if how.early_launch and self._early else 4)
        return [
            NUMBERED.index(how.schedule), flags, how.cluster, how.group_warps, how.rows_per_cta, how.ctas,
        ]  # fmt: skip

    def _use_bound(self, timeout_ms: int) -> None:
        if timeout_ms != self._bound:
            self._lib.cuda_set_timeout_ms(self._handle, timeout_ms)
            self._bound = timeout_ms

    def set_timeout_ms(self, timeout_ms: int) -> None:
        self._bounds = (timeout_ms, timeout_ms)

    def _current_stream(self) -> int:
        stream = torch.cuda.current_stream()
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            # One channel is one sequence of calls: order this stream after the one that made the last call.
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream = stream
        return stream.cuda_stream

    # --- failures ------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether a call failed on this rank; reads pinned memory, needs no synchronisation."""
        return self._handle != 0 and bool(self._lib.cuda_failed(self._handle))

    def check(self) -> None:
        """Raise if a call failed, also one that ran inside a graph.

        Raises:
            CollectiveError: names the rank that did not arrive, or the two shapes of a call mismatch.
        """
        if self._handle != 0 and self._lib.cuda_failed(self._handle):
            raise CollectiveError(self.describe_failure())

    def poll(self) -> None:
        self.check()

    def describe_failure(self) -> str:
        """One sentence about the failure: which ranks, which call, which shape, how long."""
        return flight.sentence(self._lib, self._handle, self.name, self.rank, self.world)

    def recover(self, exchange: slab.Exchange) -> None:
        """Start afresh after a failure: every rank clears its slab and counters. Collective."""
        torch.cuda.synchronize()
        exchange(None)
        self._lib.cuda_reset(self._handle)
        exchange(None)

    def close(self) -> None:
        if self._handle == 0:
            return
        handle, self._handle = self._handle, 0
        with contextlib.suppress(Exception):
            self._lib.cuda_close(handle)
        self._slabs.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", 0):
            self.close()


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy where it begins between 16-byte vectors, as a slice of a tensor may: the kernels load vectors."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
