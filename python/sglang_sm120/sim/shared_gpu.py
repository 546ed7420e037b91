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
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

NCCL_NEEDED = (2, 30)
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
MPS_START_S = 5.0  # until the daemon listens
MPS_QUIT_S = 30.0  # until it has ended its servers

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
    for program in ("nvidia-smi", MPS_CONTROL):
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
def mps() -> Iterator[dict[str, str]]:
    """Have MPS running inside, for this process and for the ranks that it starts; gives their environment.

    One that the caller started is used and left alone.

    Raises:
        RigError: there is no MPS, or the daemon does not start.
    """
    if (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists():
        yield dict(os.environ)
        return
    if shutil.which(MPS_CONTROL) is None:
        raise RigError(f"{MPS_CONTROL} is not on PATH: several ranks on one GPU need MPS")
    before = {name: os.environ.get(name) for name in MPS_FOLDERS}
    folder = tempfile.mkdtemp(prefix="sglang-sm120-mps-")
    os.environ.update(dict.fromkeys(MPS_FOLDERS, folder))
    # A preloaded NCCL in the daemon would only cost memory.
    clean = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    try:
        started = subprocess.run([MPS_CONTROL, "-d"], env=clean, capture_output=True, text=True)
        if started.returncode != 0:
            raise RigError(f"MPS did not start: {started.stderr.strip() or started.stdout.strip()}")
        try:
            deadline = time.monotonic() + MPS_START_S
            while not (Path(folder) / "control").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            yield dict(os.environ)
        finally:
            with contextlib.suppress(subprocess.SubprocessError):
                subprocess.run(
                    [MPS_CONTROL], input="quit\n", env=clean, text=True, timeout=MPS_QUIT_S,
                    capture_output=True, check=False,
                )  # fmt: skip
            _kill_mps_of(folder)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def _kill_mps_of(folder: str) -> None:
    """End what `quit` left of the MPS in this folder: its server waits for kernels that may wait for a dead rank."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.name().startswith("nvidia-cuda-mps")
                and process.environ().get(MPS_FOLDERS[0]) == folder
            ):
                process.kill()
                process.wait(timeout=10.0)


def title(ranks: int) -> str:
    """What figures of this rig were measured on."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    gpu, driver = (part.strip() for part in told.splitlines()[0].split(","))
    return f"{ranks} ranks on one {gpu} under MPS, driver {driver}"
