"""The FlashInfer backend: what FlashInfer offers for PCIe, behind our interface, so that it is timed like any other.

Two kernels of its (`flashinfer_kernels.py`): the PCIe all-reduce followed by its fused residual add + RMSNorm, and the
one-shot all-reduce fusion that it has from TensorRT-LLM.

Neither has a bound on its waits, and the PCIe kernel rounds at every addition, so `planner.HANDICAP` asks this backend
to be clearly faster than ours before it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_sm120.comm.communicator import CollectiveError, Communicator, Op, norm_inputs
from sglang_sm120.comm.flashinfer_kernels import PACK, PcieSum, TrtllmFusion

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sglang_sm120.comm.factory import GroupSpec

Exchange = Callable[[Any], list[Any]]

ONE_SHOT = "trtllm_one_shot"
# World -> (schedule, blocks) worth timing, the default first: what won a sweep of about a hundred configurations
# (benchmark/allreduce.py). With four ranks the staged variant leaves the ranks with different bits (shown by
# tests/gpu/test_flashinfer_gpu.py), which no model that routes or verifies by its activations may get, so above two ranks
# the staged ones are left out; the start-up check of the sums demands equal bits of all others.
PCIE_WAYS: dict[int, tuple[tuple[str, int], ...]] = {
    2: (("pcie_staged", 8), ("pcie_unstaged", 16)),
    4: (("pcie_unstaged", 4), ("pcie_unstaged", 16)),
    8: (("pcie_unstaged", 16),),
}
TRTLLM_WORLDS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Modules:
    """FlashInfer's compiled modules that this backend calls, and which of them exist without compiling."""

    pcie: bool
    trtllm: bool
    norm: bool

    @classmethod
    def found(cls) -> Modules:
        """Look, compile nothing; a module that this FlashInfer does not know is absent."""

        def compiled(package: str, maker: str) -> bool:
            import importlib

            try:
                spec = getattr(importlib.import_module(package), maker)()
                return bool(spec.is_compiled)
            except Exception:  # another release, no CUDA toolkit, ...: not usable as it is
                return False

        return cls(
            pcie=compiled("flashinfer.jit.comm", "gen_pcie_ipc_comm_module"),
            trtllm=compiled("flashinfer.jit.comm", "gen_trtllm_comm_module"),
            norm=compiled("flashinfer.jit.norm", "gen_norm_module"),
        )

    @classmethod
    def common(cls, told: Sequence[Modules]) -> Modules:
        """What every rank has."""
        return cls(*(all(getattr(m, part) for m in told) for part in ("pcie", "trtllm", "norm")))


class FlashInferCommunicator(Communicator):
    """One rank's part of a group whose sums FlashInfer computes.

    Serves nothing before `prepare`, which makes the workspaces for the widest message; collective, and alike on every
    rank: a kernel that one rank cannot set up is left out by all, with its reason in `left_out`.

    Args:
        group: gloo group of these ranks; exchange: all-gather of an object over it.
        modules: which kernels may be used.
        capacity_bytes: bound on the widest message.
        shared_gpu: several of these ranks compute on one GPU.
    """

    canonical = False

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        group: ProcessGroup,
        exchange: Exchange,
        *,
        modules: Modules,
        capacity_bytes: int = 8 << 20,
        shared_gpu: bool = False,
    ) -> None:
        super().__init__(name, rank, world)
        self._group, self._exchange = group, exchange
        self._modules, self._capacity, self._shared = modules, capacity_bytes, shared_gpu
        self._pcie: PcieSum | None = None
        self._trtllm: TrtllmFusion | None = None
        self._chosen: dict[tuple[Op, int], tuple[str, int]] = {}
        self._stream: torch.cuda.Stream | None = None
        self._numel = 0
        self.left_out: dict[str, str] = {}

    # --- set-up ----------------------------------------------------------------------------------------

    def prepare(self, hidden: int, dtype: torch.dtype, rows: Sequence[int]) -> None:
        widest = min(max(rows, default=64), self._capacity // (hidden * dtype.itemsize))
        if widest < 1 or widest * hidden <= self._numel:
            return
        self._destroy()
        self._modules = Modules.common(self._exchange(self._modules))
        numel = -(-widest * hidden // PACK) * PACK
        world = self.world
        if self._modules.pcie and world in PCIE_WAYS:
            self._pcie = self._jointly("pcie", lambda: PcieSum(self._group, world, numel))
        if self._modules.trtllm and world in TRTLLM_WORLDS:
            self._trtllm = self._jointly(
                "trtllm",
                lambda: TrtllmFusion(self._group, self.rank, world, widest, hidden, self._shared),
            )
        self._numel = widest * hidden
        if self._pcie is None and self._trtllm is None:
            why = "; ".join(f"{k}: {v}" for k, v in self.left_out.items())
            raise CollectiveError(f"{self.name}: FlashInfer has no kernel for this group ({why})")

    def _jointly(self, part: str, make: Callable[[], Any]) -> Any:
        made, error = None, None
        try:
            made = make()
        except Exception as problem:  # must reach the other ranks as a text
            error = f"{type(problem).__name__}: {problem}"
        failed = [f"rank {r}: {e}" for r, e in enumerate(self._exchange(error)) if e]
        if failed:
            self.left_out[part] = "; ".join(failed)
            return None
        return made

    # --- what runs -------------------------------------------------------------------------------------

    def ways(self, op: Op) -> Sequence[tuple[str, int]]:
        out = list(PCIE_WAYS.get(self.world, ())) if self._pcie is not None else []
        return [*out, *([(ONE_SHOT, 0)] if self._trtllm is not None else [])]

    def choose(self, op: Op, rows: int, hidden: int, schedule: str, ctas: int = 0) -> None:
        if schedule:
            self._chosen[op, rows] = (schedule, ctas)
        else:
            self._chosen.pop((op, rows), None)

    def _way(self, op: Op, rows: int, numel: int) -> tuple[str, int] | None:
        """(schedule, blocks) of a call: what was chosen, else the first that takes it."""
        chosen = self._chosen.get((op, rows))
        for way in [chosen] if chosen else self.ways(op):
            if self._takes(way[0], rows, numel):
                return way
        return None

    def _takes(self, schedule: str, rows: int, numel: int) -> bool:
        if schedule == ONE_SHOT:
            return self._trtllm is not None and self._trtllm.admits(rows, numel)
        return self._pcie is not None and self._pcie.admits(numel)

    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        return (
            op is not Op.ALL_REDUCE_RMSNORM_FP8
            and dtype in (torch.bfloat16, torch.float16)
            and rows > 0
            and hidden % PACK == 0
            and self._way(op, rows, rows * hidden) is not None
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        schedule, blocks = self._begin(Op.ALL_REDUCE, x)
        if schedule == ONE_SHOT:
            assert self._trtllm is not None
            self._trtllm.sum(_flat(x), _flat(out))
        else:
            assert self._pcie is not None
            self._pcie.sum(x, out, schedule, blocks)
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
        x, residual, weight = norm_inputs(x, residual, weight)
        schedule, blocks = self._begin(Op.ALL_REDUCE_RMSNORM, x)
        out = torch.empty_like(x)
        if schedule == ONE_SHOT:
            assert self._trtllm is not None
            if weight.dtype == x.dtype:
                residual_out = torch.empty_like(x)
                self._trtllm.sum_add_norm(
                    _flat(x), _flat(residual), weight, eps, gemma, _flat(out), _flat(residual_out)
                )
                return out, residual_out
            self._trtllm.sum(_flat(x), _flat(out))
        else:
            assert self._pcie is not None
            self._pcie.sum(x, out, schedule, blocks)
        return self._add_norm(out, residual, weight, eps, gemma)

    def _add_norm(
        self,
        total: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        gemma: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._modules.norm or weight.dtype != total.dtype:
            return _add_norm_by_torch(total, residual, weight, eps, gemma)
        from flashinfer import norm

        # FlashInfer's kernel works in place, and the caller's residual must stay.
        residual_out = residual.clone()
        fused = norm.gemma_fused_add_rmsnorm if gemma else norm.fused_add_rmsnorm
        fused(_flat(total), _flat(residual_out), weight, eps)
        return total, residual_out

    def _begin(self, op: Op, x: torch.Tensor) -> tuple[str, int]:
        rows = x.numel() // x.shape[-1]
        way = self._way(op, rows, x.numel())
        if way is None:
            raise CollectiveError(
                f"{self.name}, rank {self.rank}: FlashInfer does not serve {op.value} of {tuple(x.shape)} {x.dtype}"
            )
        if x.is_cuda and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream()
            # A workspace is one sequence of calls: order this stream after the one that made the last call.
            if stream != self._stream and self._stream is not None:
                stream.wait_stream(self._stream)
                if self._pcie is not None:
                    self._pcie.move_stream()
            self._stream = stream
        self.calls[op] += 1
        return way

    def _destroy(self) -> None:
        for part in (self._pcie, self._trtllm):
            if part is not None:
                part.destroy()
        self._pcie = self._trtllm = None

    def close(self) -> None:
        # Giving the memory back is collective in FlashInfer, and a rank may be gone: the process's end frees it.
        self._pcie = self._trtllm = None


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, x.shape[-1])


def _add_norm_by_torch(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    residual_out = (total.float() + residual.float()).to(total.dtype)
    scale = weight.float() + 1.0 if gemma else weight.float()
    normed = torch.nn.functional.rms_norm(residual_out.float(), (total.shape[-1],), scale, eps)
    return normed.to(total.dtype), residual_out


def build(spec: GroupSpec) -> Communicator:
    """The builder that `comm.factory` calls: `--sm120-backend flashinfer` compiles what is missing.

    Raises:
        Declined: no CUDA device, a world FlashInfer has no kernel for, or a version without the 12.x kernels.
    """
    _check(spec)
    return _built(spec, Modules(pcie=True, trtllm=True, norm=True))


def build_compiled(spec: GroupSpec) -> Communicator:
    """As `build`, for a candidate beside ours: only kernels that exist compiled, since start-up must not take minutes.

    Raises:
        Declined: as `build`, or nothing is compiled.
    """
    from sglang_sm120.comm.factory import Declined

    _check(spec)
    modules = Modules.found()
    if not (modules.pcie or modules.trtllm):
        raise Declined(
            "none of FlashInfer's all-reduce kernels is compiled; --sm120-backend flashinfer compiles them"
        )
    return _built(spec, modules)


def _check(spec: GroupSpec) -> None:
    from sglang_sm120.comm.factory import Declined
    from sglang_sm120.fabric.versions import check_flashinfer, installed

    if spec.device.type != "cuda":
        raise Declined(f"FlashInfer sums CUDA tensors, and this rank computes on {spec.device}")
    if spec.world not in TRTLLM_WORLDS:
        raise Declined(
            f"FlashInfer serves {', '.join(map(str, TRTLLM_WORLDS))} ranks, not {spec.world}"
        )
    refusal = check_flashinfer(installed().flashinfer)
    if refusal is not None:
        raise Declined(f"{refusal.reason}. {refusal.remedy}")


def _built(spec: GroupSpec, modules: Modules) -> FlashInferCommunicator:
    from sglang_sm120.comm.native_build import process_group_exchange

    return FlashInferCommunicator(
        spec.name,
        spec.rank,
        spec.world,
        spec.process_group,
        process_group_exchange(spec.process_group),
        modules=modules,
        capacity_bytes=spec.capacity_bytes,
        shared_gpu=len({peer.gpu for peer in spec.peers}) < spec.world,
    )
