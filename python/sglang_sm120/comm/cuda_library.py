"""Find the CUDA library: built with the package, or compiled at first use from the same sources."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from sglang_sm120.comm._lib import LIBRARY_DIR, LibraryMissing, load

NAME = "sglang_sm120_cuda"
COMPILE_S = 1800  # longest build; two minutes are usual on few cores
SOURCES = (
    "cuda/channel.cu",
    "cuda/memory.cu",
    "cuda/flat_one_shot_2.cu",
    "cuda/flat_one_shot_4.cu",
    "cuda/flat_one_shot_8.cu",
    "cuda/flat_two_shot_4.cu",
    "cuda/flat_two_shot_8.cu",
    "cuda/general.cu",
    "cuda/relay.cu",
    "cuda/prefetch.cu",
    "cuda/probe.cu",
    "cuda/share.cu",
    "ffi/cuda.cpp",
    "ffi/prefetch.cpp",
    "ffi/probe.cpp",
    "ffi/share.cpp",
)


class CudaLibraryMissing(LibraryMissing):
    """The CUDA library is not there and cannot be compiled; the text says what to install."""


@functools.cache
def cuda_library() -> Any:
    """The tvm-ffi module of the CUDA kernels.

    Raises:
        CudaLibraryMissing: it was not built, and there is no nvcc (or it failed) to compile it now.
    """
    if (LIBRARY_DIR / f"lib{NAME}.so").exists():
        return load(NAME)
    import tvm_ffi

    return tvm_ffi.load_module(str(compile_now()))


def source_dir() -> Path | None:
    """Where the C++ sources are: beside the package in a wheel, or in the checkout."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "csrc", package.parent.parent / "csrc"):
        if (candidate / "cuda" / "channel.cu").exists():
            return candidate
    return None


def digest(sources: Path, flags: list[str]) -> str:
    """Name of a build: every source file that it includes, and the compiler's flags."""
    h = hashlib.sha256(" ".join(flags).encode())
    for folder in ("core", "cuda", "ffi"):
        for path in sorted((sources / folder).iterdir()):
            h.update(path.name.encode() + path.read_bytes())
    return h.hexdigest()[:16]


def compile_now(cache: Path | None = None) -> Path:
    """Compile for the GPU of this process with nvcc; cached by the digest of the sources.

    Args:
        cache: folder for builds; default ~/.cache/sglang-sm120/cuda.

    Raises:
        CudaLibraryMissing: no sources, no nvcc, no folder for the build, or nvcc failed (its last lines are in the text).
    """
    import torch

    nvcc = shutil.which("nvcc") or _nvcc_beside_cuda_home()
    sources = source_dir()
    if nvcc is None or sources is None:
        lacking = "nvcc is not on PATH" if nvcc is None else "the package carries no csrc folder"
        raise CudaLibraryMissing(
            f"the CUDA kernels were not built with this package and cannot be compiled now ({lacking}): "
            "install a CUDA toolkit of version 12.4 or newer and run `pip install .` again"
        )
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}" + ("a" if major >= 12 else "")
    flags = [
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        "-std=c++20",
        "-O3",
        "-Xcompiler=-fPIC",
    ]
    try:
        cache = cache or Path("~/.cache/sglang-sm120/cuda").expanduser()
        target = cache / digest(sources, flags) / f"lib{NAME}.so"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            # One rank compiles and the others wait: together they would take the memory of as many builds.
            with open(target.parent / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not target.exists():
                    _compile(nvcc, sources, flags, target)
    except CudaLibraryMissing:
        raise
    except (
        OSError,
        RuntimeError,
    ) as problem:  # a folder that cannot be written, a user without a home
        raise CudaLibraryMissing(
            f"the CUDA kernels cannot be compiled now: there is nowhere to keep them ({problem}); "
            "run `pip install .` with a CUDA toolkit on PATH instead"
        ) from None
    return target


def _compile(nvcc: str, sources: Path, flags: list[str], target: Path) -> None:
    import tvm_ffi.libinfo as info

    includes = [
        f"-I{sources}",
        f"-I{info.find_include_path()}",
        f"-I{info.find_dlpack_include_path()}",
    ]
    library = Path(info.find_libtvm_ffi())
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        command = [
            nvcc, "-shared", "-cudart=static", "--threads=0", *flags, *includes,
            *(str(sources / name) for name in SOURCES),
            f"-L{library.parent}", "-ltvm_ffi", "-o", str(output),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=COMPILE_S
            )
        except subprocess.TimeoutExpired:
            raise CudaLibraryMissing(
                f"nvcc did not compile the CUDA kernels within {COMPILE_S} s"
            ) from None
        if done.returncode != 0:
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
            raise CudaLibraryMissing(f"nvcc could not compile the CUDA kernels:\n{tail}")
        os.replace(output, target)


def _nvcc_beside_cuda_home() -> str | None:
    return shutil.which("nvcc", path="/usr/local/cuda/bin")
