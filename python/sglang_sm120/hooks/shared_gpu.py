"""Several ranks on one GPU, for development: the launcher gives every scheduler process device 0.

SGLang refuses `--gpu-id-step 0`. MPS has to run, or the ranks' kernels take turns and a sum never ends; NCCL serves
several ranks of one GPU from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1 (`sim/shared_gpu.py` sets all of it up).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
