"""The out-of-tree SGLang platform `sm120_sim`: real servers, EAGLE-3 included, on a machine without a GPU.

Active only when `SGLANG_PLATFORM=sm120_sim`. `activate` prepares the process's environment and names the platform
class; `init_backend`, which SGLang calls in every process that imports its model runner, installs torch versions of
what SGLang has only for GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from sglang.srt.environ import envs
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_sm120.sim import kv_kernels, patches

NAME = "sm120_sim"
_MAX_RANKS = 16


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform class's path if this platform was asked for, else None."""
    if envs.SGLANG_PLATFORM.get() != NAME:
        return None
    for name, value in default_env(sorted(os.sched_getaffinity(0))).items():
        os.environ.setdefault(name, value)
    patches.install_launch_hooks()
    return f"{__name__}.SimPlatform"


def default_env(cpus: list[int]) -> dict[str, str]:
    """Environment of a server on this platform, for variables the user has not set.

    Args:
        cpus: The processor numbers this process may use.
    """
    return {
        # One processor per rank, dealt out in turn; SGLang takes the first entries.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
            str(cpus[rank % len(cpus)]) for rank in range(max(_MAX_RANKS, len(cpus)))
        ),
        "OMP_NUM_THREADS": "1",
        "SGLANG_ROPE_CACHE_FP32": "1",
    }


class SimPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU tensors, gloo groups, eager execution; attention through the "triton" backend's torch replacement."""

    _enum = PlatformEnum.OOT
    device_name = NAME
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return patches.ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return patches.ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ("EAGLE", "EAGLE3")

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == patches.ATTENTION_BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        return kv_kernels.extended_slots

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def init_backend(self) -> None:
        patches.install_worker_hooks()

    def post_load_model(self, model: torch.nn.Module) -> None:
        patches.check_installed()
        patches.fill_empty_names()
