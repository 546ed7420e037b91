"""The host backend: ranks are processes (or threads) of one machine that sum CPU tensors in shared memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_sm120.comm._lib import host_library
from sglang_sm120.comm.communicator import CollectiveError, Communicator, Op, norm_inputs
from sglang_sm120.comm.flight import OPS, PHASES
from sglang_sm120.comm.schedule import SCHEDULES, islands_text

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# A call travels in pieces of at most this size: larger ones would not stay in a core's cache.
_LARGEST_PIECE = 1 << 20


@dataclass(frozen=True)
class FlightRecord:
    """Whom a rank was waiting for when its call failed.

    Attributes:
        rank: the rank that wrote the record.
        phase: "reduce", "cross", "gather" or "record": what had not arrived.
        tile: index of the first tile that was incomplete.
        source: the rank named in the error.
        call: number of calls this communicator had begun before this one.
        waited_ns: nanoseconds since this rank last received anything.
    """

    rank: int
    channel: int
    phase: str
    tile: int
    source: int
    op: Op
    rows: int
    hidden: int
    call: int
    waited_ns: int


class HostCommunicator(Communicator):
    """One rank's part of a group whose tensors live in host memory.

    Joining is collective: the constructor returns when all ranks of `session` have joined. The shared
    memory's name is removed before it returns, so no process, however it ends, leaves anything behind.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        *,
        session: str,
        islands: str | Sequence[Sequence[int]] | None = None,
        capacity_bytes: int = _LARGEST_PIECE,
        timeout_ms: int = 20_000,
        join_timeout_ms: int = 60_000,
        schedule: str = "auto",
        wire: str = "lossless",
        fp32_partials: bool = False,
        channels: int = 1,
        ctas: int = 1,
    ) -> None:
        """Join the group.

        Args:
            name: group name, for logs.
            rank: this process's index in the group.
            world: ranks in the group, 1 to 16.
            session: text shared by the ranks of this group and unique on this machine.
            islands: partition of the ranks, as text ("0-3;4-7") or as lists; None is one island.
            capacity_bytes: shared memory for one message; larger calls travel in pieces.
            timeout_ms: longest wait for a missing rank within a call.
            join_timeout_ms: longest wait for all ranks to join.
            schedule: "auto" or a name in `sglang_sm120.comm.schedule.SCHEDULES`.
            wire: "lossless" (the tensor's dtype) or "int8" (blocks of 32 with a shared exponent).
            fp32_partials: exchange island partials as fp32 (one rounding) rather than in the wire's form.
            channels: independent sections, one per stream of calls.
            ctas: tile runs a rank works on in turns; results never depend on it.

        Raises:
            CollectiveError: a rank did not join, or joined with another configuration.
            ValueError: an argument is outside what the engine supports.
        """
        super().__init__(name, rank, world)
        if not 0 <= rank < world <= 16:
            raise ValueError(f"rank {rank} of world {world}: the world must be 1 to 16 ranks")
        if schedule != "auto" and schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r} is not auto or one of {', '.join(SCHEDULES)}")
        if wire not in ("lossless", "int8"):
            raise ValueError(f"wire {wire!r} is not lossless or int8")
        if channels < 1 or ctas < 1 or capacity_bytes < 1024 or timeout_ms < 1:
            raise ValueError("channels, ctas and timeout_ms must be 1 or more, capacity_bytes 1024")
        self._lib = host_library()
        self._channel = 0
        self._handle = 0
        self._owned: list[HostCommunicator] = []
        try:
            self._handle = self._lib.host_open(
                session,
                rank,
                world,
                islands_text(islands),
                channels,
                min(capacity_bytes, _LARGEST_PIECE) if schedule == "auto" else capacity_bytes,
                timeout_ms,
                join_timeout_ms,
                -1 if schedule == "auto" else SCHEDULES.index(schedule),
                wire == "int8",
                fp32_partials,
                ctas,
            )
        except RuntimeError as error:
            raise CollectiveError(f"{name}: {_sentence(error)}") from None
        for index in range(1, channels):
            self._owned.append(self._sibling(index))

    def _sibling(self, channel: int) -> HostCommunicator:
        sibling = object.__new__(HostCommunicator)
        Communicator.__init__(sibling, self.name, self.rank, self.world)
        sibling._lib = self._lib
        sibling._handle = self._handle
        sibling._channel = channel
        sibling._owned = []
        return sibling

    def channel(self, index: int) -> HostCommunicator:
        """The communicator of channel `index`: its calls are ordered apart from the other channels'."""
        return self if index == 0 else self._owned[index - 1]

    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        return (
            dtype in _DTYPES
            and rows >= 0
            and self._handle != 0
            and bool(self._lib.host_admits(self._handle, hidden, _DTYPES[dtype]))
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._call(self._lib.host_all_reduce, x, out)
        self.calls[Op.ALL_REDUCE] += 1
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
        x = x.contiguous()
        out = torch.empty_like(x)
        residual_out = torch.empty_like(x)
        self._call(
            self._lib.host_all_reduce_rmsnorm,
            x,
            *norm_inputs(x, residual, weight)[1:],
            eps,
            gemma,
            out,
            residual_out,
        )
        self.calls[Op.ALL_REDUCE_RMSNORM] += 1
        return out, residual_out

    def all_reduce_rmsnorm_fp8(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        gemma: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `all_reduce_rmsnorm`, then quantise each row to FP8 E4M3 with one scale.

        scale = amax(normed row) / 448 and code = e4m3(normed / scale), rounding half to even and
        saturating: what SGLang's per-token quantiser makes of the same normed row.

        Returns:
            (codes [rows, hidden] float8_e4m3fn, scales [rows, 1] fp32, residual_out [rows, hidden]).

        Raises:
            CollectiveError: as for `all_reduce`.
        """
        x = x.contiguous()
        normed = torch.empty_like(x)
        residual_out = torch.empty_like(x)
        codes = torch.empty(x.shape, dtype=torch.uint8)
        scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
        self._call(
            self._lib.host_all_reduce_rmsnorm_fp8,
            x,
            *norm_inputs(x, residual, weight)[1:],
            eps,
            gemma,
            normed,
            residual_out,
            codes,
            scales,
        )
        self.calls[Op.ALL_REDUCE_RMSNORM_FP8] += 1
        return codes.view(torch.float8_e4m3fn), scales, residual_out

    def flight_record(self) -> FlightRecord | None:
        """What this rank waited for when a call failed; None while none has."""
        self._require_open()
        raw = list(self._lib.host_flight(self._handle, self._channel))
        if not raw[0]:
            return None
        rank, channel, phase, tile, source, op, _, rows, hidden, call, waited = raw[1:]
        return FlightRecord(
            rank, channel, PHASES[phase], tile, source, OPS[op], rows, hidden, call, waited
        )

    def payload_bytes(self) -> list[int]:
        """Bytes of tiles this rank has stored into each rank's slab since it joined."""
        self._require_open()
        return list(self._lib.host_payload_bytes(self._handle, self._channel))

    def set_timeout_ms(self, timeout_ms: int) -> None:
        self._require_open()
        self._lib.host_set_timeout_ms(self._handle, timeout_ms)

    def close(self) -> None:
        if self._handle == 0:
            return
        handle, self._handle = self._handle, 0
        self._lib.host_close(handle, self._channel)
        if self._channel == 0:
            for sibling in self._owned:
                sibling.close()
            self._lib.host_free(handle)

    def __del__(self) -> None:
        # At interpreter exit the library's functions are gone, and the process's end frees the memory.
        if getattr(self, "_handle", 0) and self._channel == 0 and not sys.is_finalizing():
            self.close()

    def _require_open(self) -> None:
        if self._handle == 0:
            raise CollectiveError(f"{self.name}: the communicator of rank {self.rank} is closed")

    def _call(self, function: Any, *args: Any) -> None:
        self._require_open()
        try:
            function(self._handle, self._channel, *args)
        except RuntimeError as error:
            raise CollectiveError(f"{self.name}: {_sentence(error)}") from None


def _sentence(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[-1]
