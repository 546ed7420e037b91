"""The rig of several ranks on one GPU: MPS around it, what the servers need in their environment, and their flags.

Its ranks reach each other through the GPU's memory instead of PCIe, so a time measured here is that of the kernels
and of the server around them, never that of a link.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

NCCL_NEEDED = (2, 30)

# Held at 2 and 4 ranks: small pools, and only kernels that are compiled at first use or come with sgl_kernel.
FLAGS: tuple[str, ...] = (
    "--device", "cuda",
    "--mem-fraction-static", "0.08",
    "--attention-backend", "triton",
    "--sampling-backend", "pytorch",
    "--cuda-graph-max-bs-decode", "4",
    "--max-running-requests", "4",
    "--disable-prefill-cuda-graph",
    "--enforce-disable-flashinfer-allreduce-fusion",
    "--sm120-shared-gpu",
)  # fmt: skip

# SGLang picks the platform itself; its memory check takes the other ranks for an intruder. With NCCL's default number
# of CTAs the kernels of four ranks cannot all be resident, and the capture of a graph never ends.
ENVIRONMENT: dict[str, str | None] = {
    "SGLANG_PLATFORM": None,
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_MIN_CTAS": "1",
}


class RigError(RuntimeError):
    """This machine cannot run several ranks on one GPU; the text says what is missing."""


def check() -> None:
    """Refuse a machine without a GPU, MPS or a new enough NCCL.

    Raises:
        RigError: with what is missing and how to get it.
    """
    for program in ("nvidia-smi", "nvidia-cuda-mps-control"):
        if shutil.which(program) is None:
            raise RigError(
                f"{program} was not found: several ranks on one GPU need NVIDIA's driver and MPS"
            )
    version = nccl_version()
    if version < NCCL_NEEDED:
        raise RigError(
            f"NCCL {'.'.join(map(str, version))} refuses several ranks on one GPU; preload 2.30 or newer "
            "(LD_PRELOAD=.../libnccl.so.2, and the same in SGLANG_NCCL_SO_PATH)"
        )


def nccl_version() -> tuple[int, ...]:
    """(major, minor, patch) of the NCCL that a server would load; (0,) when none can be loaded."""
    program = (
        "import ctypes, torch\n"
        "version = ctypes.c_int()\n"
        "ctypes.CDLL('libnccl.so.2').ncclGetVersion(ctypes.byref(version))\n"
        "print(version.value)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode != 0:
        return (0,)
    code = int(done.stdout.split()[-1])
    return code // 10000, code // 100 % 100, code % 100


@contextlib.contextmanager
def mps() -> Iterator[None]:
    """Have MPS running inside; one that the caller started is used and left alone.

    Raises:
        RigError: the daemon does not start.
    """
    if (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists():
        yield
        return
    folder = tempfile.mkdtemp(prefix="sglang-sm120-mps-")
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
    # A preloaded NCCL in the daemon would only cost memory.
    clean = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    try:
        started = subprocess.run(
            ["nvidia-cuda-mps-control", "-d"], env=clean, capture_output=True, text=True
        )
        if started.returncode != 0:
            raise RigError(f"MPS did not start: {started.stderr.strip() or started.stdout.strip()}")
        try:
            yield
        finally:
            subprocess.run(
                ["nvidia-cuda-mps-control"], input="quit\n", env=clean, text=True, timeout=30,
                capture_output=True, check=False,
            )  # fmt: skip
    finally:
        del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]
        shutil.rmtree(folder, ignore_errors=True)


def title(ranks: int) -> str:
    """What figures of this rig were measured on."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    gpu, driver = (part.strip() for part in told.splitlines()[0].split(","))
    return f"{ranks} ranks on one {gpu} under MPS, driver {driver}"
