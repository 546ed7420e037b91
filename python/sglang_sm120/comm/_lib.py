"""Load the C++ libraries that the build put beside the Python files, each once per process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

LIBRARY_DIR = Path(__file__).resolve().parent.parent / "_lib"


class LibraryMissing(RuntimeError):
    """A C++ library was not built; the text names the file and how to build it."""


@functools.cache
def load(name: str) -> Any:
    """Return the tvm-ffi module of `lib<name>.so`; its functions are attributes.

    Args:
        name: "sglang_sm120_host" (always built) or "sglang_sm120_cuda" (built where nvcc is found).

    Raises:
        LibraryMissing: the file is not there.
    """
    import tvm_ffi

    path = LIBRARY_DIR / f"lib{name}.so"
    if not path.exists():
        raise LibraryMissing(
            f"{path} does not exist: build the package with `pip install .` or, in a checkout, `make build`"
        )
    return tvm_ffi.load_module(str(path))


def host_library() -> Any:
    """The host engine, the schedules as data, and the protocol's test rigs."""
    return load("sglang_sm120_host")
