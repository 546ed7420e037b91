"""Several ranks on one GPU, for development: the launcher gives every scheduler process device 0.

SGLang refuses `--gpu-id-step 0`. MPS has to run, or the ranks' kernels take turns and a sum never ends; NCCL serves
several ranks of one GPU from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1 (`sim/shared_gpu.py` sets all of it up).
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookType

from sglang_sm120.hooks import contract
from sglang_sm120.hooks.contract import Binding, Part, Target

_installed = False


@contextmanager
def on_gpu_0(gpu_id: int) -> Iterator[int]:
    """In the place of `maybe_reindex_device_id`: GPU 0 whichever was meant."""
    yield 0


def install_once() -> None:
    """Install in this process, once; SGLang resolves its arguments more than once.

    Raises:
        HookRefused: the installed SGLang hands out devices in another way.
    """
    global _installed
    if not _installed:
        contract.install(PART)
        _installed = True


def print_stacks_when_asked() -> None:
    """On SIGUSR2, print the Python stacks of all threads to the log: ranks on one GPU can wait for each other for ever."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)


def fit_tuner() -> None:
    """Where SGLang uses FlashInfer's PCIe all-reduce: let its tuner try only launches whose CTAs of all ranks fit the GPU.

    A rank's CTAs wait for those of the others; what is not resident together waits for ever.
    """
    if not envs.SGLANG_ENABLE_PCIE_IPC_ALLREDUCE.get():
        return
    try:
        from flashinfer.comm import pcie_ipc_tuning as tuning
    except ImportError:  # SGLang says so itself
        return
    original = tuning.candidate_tactics

    def fitting(world_size: int, *args: Any, **kwargs: Any) -> tuple[tuple[int, int, int], ...]:
        # Registers may let only one CTA into a multiprocessor, whatever its size. Half of the GPU is left for the ranks'
        # other kernels: those of a cluster need free multiprocessors side by side, or all ranks wait for ever.
        most = torch.cuda.get_device_properties(0).multi_processor_count // (2 * world_size)
        return tuple(
            (variant, ctas, threads)
            for variant, ctas, threads in original(world_size, *args, **kwargs)
            if ctas <= most and not copies_by_engine(tuning.IpcVariant(variant))
        )

    tuning.candidate_tactics = fitting


def copies_by_engine(variant: Any) -> bool:
    """Whether a variant of FlashInfer's is made of copies between devices, of which there is one here."""
    return bool(variant.name.startswith("COPY_ENGINE"))


PART = Part(
    "shared_gpu",
    (
        Binding(
            Target(
                "sglang.srt.utils.common.maybe_reindex_device_id",
                "(gpu_id)",
                "runs all ranks on GPU 0 with --sm120-shared-gpu",
            ),
            HookType.REPLACE,
            on_gpu_0,
        ),
    ),
)
