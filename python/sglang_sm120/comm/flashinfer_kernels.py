"""FlashInfer's two kernels for PCIe as objects: workspaces made together, sums, teardown. Written for FlashInfer 0.7."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Our name of a schedule -> value of `flashinfer.comm.pcie_ipc_policy.IpcVariant`, which is append-only.
PCIE_VARIANTS = {
    "pcie_unstaged": 0,
    "pcie_staged": 1,
    "pcie_staged_ring": 2,
    "pcie_flat_staged": 3,
}
THREADS = 256  # of a block of the PCIe kernel: the best of 128, 256 and 512 at nearly every size
MAX_BLOCKS = 32
PACK = 8  # elements of 16 bits in the 16 bytes that the PCIe kernel moves at a time
ONE_SHOT_ROWS = 128  # above it FlashInfer itself leaves the one-shot kernel
# Ranks that share a GPU need all their CTAs resident at once: rows x ranks up to which the one-shot kernel's are.
SHARED_GPU_ROWS = 64


class PcieSum:
    """FlashInfer's PCIe all-reduce over a workspace of its own. Construction and `destroy` are collective."""

    def __init__(self, group: ProcessGroup, world: int, max_numel: int) -> None:
        from flashinfer.comm.pcie_ipc_ar import PcieIpcAllReduceWorkspace
        from flashinfer.comm.pcie_ipc_policy import IpcLaunchConfig, IpcVariant

        self.max_numel = max_numel
        self._world = world
        self._config, self._variant = IpcLaunchConfig, IpcVariant
        # The profile only names entries of FlashInfer's own tuning cache, which is not used here.
        self._workspace = PcieIpcAllReduceWorkspace(
            group, max_numel, max_blocks=MAX_BLOCKS, profile="rootcplx"
        )

    def admits(self, numel: int) -> bool:
        return numel % PACK == 0 and PACK * self._world <= numel <= self.max_numel

    def sum(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        schedule: str,
        blocks: int,
        threads: int = THREADS,
    ) -> None:
        config = self._config(blocks, threads, self._variant(PCIE_VARIANTS[schedule]))
        self._workspace.all_reduce(x, out=out, config=config)

    def move_stream(self) -> None:
        """The next call comes from another stream, which has been ordered after the last one."""
        self._workspace.rebind_stream()

    def destroy(self) -> None:
        self._workspace.destroy()


class TrtllmFusion:
    """TensorRT-LLM's all-reduce, plain or with residual add + RMSNorm. Construction is collective.

    Attributes:
        one_shot, pdl: which kernel runs, and whether the next one may be scheduled before it ends.
    """

    def __init__(
        self, group: ProcessGroup, rank: int, world: int, rows: int, hidden: int, shared_gpu: bool
    ) -> None:
        self.one_shot = self.pdl = True
        from flashinfer.comm import trtllm_ar

        self._ar, self._rank, self._world, self._shared = trtllm_ar, rank, world, shared_gpu
        self.max_numel = rows * hidden
        with _peer_buffers(trtllm_ar, group, rank) as self.buffers:
            made: Any = trtllm_ar.trtllm_create_ipc_workspace_for_all_reduce_fusion(
                rank, world, rows, hidden, use_fp32_lamport=False, group=group
            )
        self._handles, self._workspace = made[:2]

    def admits(self, rows: int, numel: int) -> bool:
        crowd = self._shared and self._world > 2 and rows * self._world > SHARED_GPU_ROWS
        return numel <= self.max_numel and rows <= ONE_SHOT_ROWS and not crowd

    def sum(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._call(x, self._ar.AllReduceFusionPattern.kAllReduce, allreduce_out=out)

    def sum_add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        gemma: bool,
        out: torch.Tensor,
        residual_out: torch.Tensor,
    ) -> None:
        self._call(
            x,
            self._ar.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=residual,
            residual_out=residual_out,
            norm_out=out,
            rms_gamma=weight,
            rms_eps=eps,
            weight_bias=1.0 if gemma else None,
        )

    def _call(self, x: torch.Tensor, pattern: Any, **given: Any) -> None:
        absent = dict.fromkeys(
            (
                "allreduce_out", "residual_in", "residual_out", "norm_out", "quant_out", "scale_out",
                "rms_gamma", "scale_factor", "layout_code",
            )
        )  # fmt: skip
        self._ar.trtllm_allreduce_fusion(
            allreduce_in=x,
            world_size=self._world,
            world_rank=self._rank,
            token_num=x.numel() // x.shape[-1],
            hidden_dim=x.shape[-1],
            workspace_ptrs=self._workspace,
            launch_with_pdl=self.pdl,
            trigger_completion_at_end=False,
            fp32_acc=True,
            pattern_code=pattern,
            use_oneshot=self.one_shot,
            **{**absent, "rms_eps": 1e-6, **given},
        )

    def destroy(self) -> None:
        from flashinfer.comm.cuda_ipc import free_shared_buffer

        torch.cuda.synchronize()
        for pointers, group in self.buffers:
            free_shared_buffer(pointers, group=group)
        self.buffers.clear()


@contextlib.contextmanager
def _peer_buffers(trtllm_ar: Any, group: ProcessGroup, rank: int) -> Iterator[list[Any]]:
    """Let FlashInfer share its workspace by CUDA IPC while it is made.

    By itself it takes torch's symmetric memory, whose barriers need peer atomics, which PCIe does not have, and which
    refuses ranks that share a GPU. Yields the list of what was shared.
    """
    from flashinfer.comm.cuda_ipc import create_shared_buffer, cudart

    shared: list[Any] = []

    def allocate(nbytes: int, *_: Any, **__: Any) -> tuple[list[int], None, None]:
        pointers = create_shared_buffer(nbytes, group=group)
        shared.append((pointers, group))
        cudart.cudaMemset(pointers[rank], 0, nbytes)
        torch.cuda.synchronize()
        torch.distributed.barrier(group=group)
        return pointers, None, None

    theirs = trtllm_ar._alloc_symm_buffer_bytes
    trtllm_ar._alloc_symm_buffer_bytes = allocate
    try:
        yield shared
    finally:
        trtllm_ar._alloc_symm_buffer_bytes = theirs
