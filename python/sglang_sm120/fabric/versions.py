"""Which versions are installed, and which of them are known not to work on SM120.

The checks are pure functions over version strings; `installed()` reads the strings from this environment.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path

import msgspec

Version = tuple[int, ...]

# FlashInfer 0.6.17 is the first release with its pull request 3903 (2026-07-28): before it the
# TensorRT-LLM all-reduce was not compiled for 12.x, and its stand-alone kernel had an empty body there.
FLASHINFER_FIRST_12X: Version = (0, 6, 17)


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Version strings as installed; "" where a package is missing.

    `nccl_cuda` is the CUDA release that the NCCL library was built with ("12.8"), from the text in the
    library; `driver` is the NVIDIA kernel driver's.
    """

    plugin: str = ""
    sglang: str = ""
    torch: str = ""
    flashinfer: str = ""
    nccl: str = ""
    nccl_cuda: str = ""
    driver: str = ""


class Refusal(msgspec.Struct, frozen=True):
    """Why something installed must not be used: `fatal` when it cannot work, else it is only risky."""

    package: str
    reason: str
    remedy: str
    fatal: bool = True


def parse(text: str) -> Version:
    """The leading numbers of a version string: "0.6.17.post1" -> (0, 6, 17); "" -> ()."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def check_flashinfer(installed: str) -> Refusal | None:
    """Whether FlashInfer's TensorRT-LLM all-reduce may run on compute capability 12.x.

    Release candidates of the first good version count as good: they contain the change.
    """
    if not installed:
        return Refusal(
            "flashinfer",
            "FlashInfer is not installed",
            "pip install 'flashinfer-python>=0.6.17'",
        )
    if parse(installed) < FLASHINFER_FIRST_12X:
        return Refusal(
            "flashinfer",
            f"FlashInfer {installed} has no sound all-reduce for SM120/SM121 "
            "(compiled for 9.x and 10.x only; on 12.x its stand-alone kernel is empty)",
            "FlashInfer 0.6.17 or newer is needed: pip install -U 'flashinfer-python>=0.6.17'",
        )
    return None


def check_nccl(installed: str, built_with_cuda: str = "") -> Refusal | None:
    """Whether this NCCL library is known to fail on SM120.

    Sources: nccl-tests issues 287 and 291 (kernels of 2.25 need more shared memory than SM120 has; 2.26.2
    is the fix), nccl issue 2418 (2.26.2 built with CUDA 12.2: illegal memory access in collectives of
    512 KiB and more) and nccl issue 1852 (2.27.5 built with CUDA 12.4: the same size, through shared memory).
    Both of the latter lack SM120 machine code, which `makefiles/common.mk` adds from CUDA 12.8 on.
    """
    number = parse(installed)
    if not number:
        return None
    if number < (2, 26, 2):
        return Refusal(
            "nccl",
            f"NCCL {installed} needs more shared memory per block than SM120 offers: collectives fail",
            "NCCL 2.27.3 or newer, built with CUDA 12.8 or newer: pip install -U nvidia-nccl-cu12",
        )
    old_build = bool(parse(built_with_cuda)) and parse(built_with_cuda) < (12, 8)
    if number < (2, 27, 3) or old_build:
        built = f" built with CUDA {built_with_cuda}" if built_with_cuda else ""
        return Refusal(
            "nccl",
            f"NCCL {installed}{built} is reported to fail on SM120 with an illegal memory access in "
            "messages of 512 KiB and more",
            "first good version 2.27.3, built with CUDA 12.8 or newer: pip install -U nvidia-nccl-cu12",
            fatal=False,
        )
    return None


def nccl_library() -> Path | None:
    """The NCCL library that PyTorch's wheel loads, if it is installed as a package."""
    spec = find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        library = Path(root) / "nccl" / "lib" / "libnccl.so.2"
        if library.is_file():
            return library
    return None


@lru_cache(maxsize=4)
def nccl_build(library: Path) -> tuple[str, str]:
    """(version, CUDA it was built with) from the text inside an NCCL library; ("", "") if absent.

    The library has hundreds of MiB: it is mapped and searched, not read.
    """
    expression = rb"NCCL version (\d+\.\d+\.\d+)\+cuda(\d+\.\d+)"
    with open(library, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as text:
        at = text.find(b"NCCL version 2")
        while at >= 0:
            match = re.match(expression, text[at : at + 64])
            if match:
                return match[1].decode(), match[2].decode()
            at = text.find(b"NCCL version 2", at + 1)
    return "", ""


def _package(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _source_version(package: str) -> str:
    """Version that a package built from source carries in its `_build_meta.py`; "" where there is none."""
    spec = find_spec(package)
    for root in spec.submodule_search_locations or [] if spec else []:
        meta = Path(root) / "_build_meta.py"
        match = re.search(r'__version__ = "([^"]+)"', meta.read_text()) if meta.is_file() else None
        if match:
            return match[1]
    return ""


def kernel_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Version of the loaded NVIDIA kernel driver; "" when there is none."""
    try:
        match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", path.read_text())
    except OSError:
        return ""
    return match[1] if match else ""


def installed(driver: str = "") -> Versions:
    """The versions of this environment; imports none of the packages.

    `driver` is read from the kernel when it is not given.
    """
    library = nccl_library()
    nccl, cuda = nccl_build(library) if library else ("", "")
    return Versions(
        plugin=_package("sglang-sm120"),
        sglang=_package("sglang"),
        torch=_package("torch"),
        flashinfer=_package("flashinfer-python") or _source_version("flashinfer"),
        nccl=nccl or _package("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        nccl_cuda=cuda,
        driver=driver or kernel_driver(),
    )
