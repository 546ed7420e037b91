"""Runs torch functions where SGLang launches Triton kernels, on a machine without a GPU.

`replaces(path)` declares the torch version of one `@triton.jit` kernel. The function's keyword parameters are the
kernel's own, name by name, so a release that changes a kernel is noticed instead of misread; a parameter named
`launch_grid` gets the grid. `install` makes every launch of the process look its kernel up here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from triton.runtime.jit import JITFunction

_GRID = "launch_grid"
_IMPLEMENTATIONS: dict[str, Callable[..., None]] = {}
# Launch options of Triton itself, not arguments of a kernel.
_TRITON_OPTIONS = {"num_warps", "num_stages", "num_ctas", "launch_pdl", "maxnreg", "warmup"}


class MissingKernelError(RuntimeError):
    """SGLang launched or lacks a kernel in a way this platform was not written for."""


def replaces(path: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a function as the torch version of the Triton kernel `module.name`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        _IMPLEMENTATIONS[path] = function
        return function

    return register


def declared() -> dict[str, Callable[..., None]]:
    """Kernel path -> torch version, for every kernel declared so far."""
    return dict(_IMPLEMENTATIONS)


def mismatch(path: str) -> str | None:
    """One sentence on how the installed SGLang's kernel differs from the declared one; None if it does not."""
    module_name, _, name = path.rpartition(".")
    try:
        kernel = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        return f"SGLang's kernel {path} does not exist ({error})"
    found = getattr(kernel, "arg_names", None)
    if found is None:
        return f"{path} is not a Triton kernel"
    expected = _parameters(_IMPLEMENTATIONS[path])
    if set(found) != expected:
        added, gone = sorted(set(found) - expected), sorted(expected - set(found))
        return f"SGLang's kernel {path} has other parameters (new: {added}, gone: {gone})"
    return None


def install() -> None:
    """Route every Triton launch of this process to its torch version; idempotent.

    A launch of a kernel that has none raises MissingKernelError with the kernel's name.
    """
    if JITFunction.run is not _run:
        JITFunction.run = _run


def refuse(kernel: str, **unsupported: object) -> None:
    """Stop a torch version whose kernel was launched with an option it does not have.

    Args:
        kernel: The kernel's name.
        unsupported: Options by name; a true value means that it was used.

    Raises:
        MissingKernelError: One was.
    """
    used = [name for name, value in unsupported.items() if value]
    if used:
        raise MissingKernelError(
            f"the torch version of {kernel} does not support {', '.join(used)}"
        )


def _parameters(function: Callable[..., None]) -> set[str]:
    return set(inspect.signature(function).parameters) - {_GRID}


def _run(kernel: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
    path = f"{kernel.module}.{kernel.fn.__name__}"
    function = _IMPLEMENTATIONS.get(path)
    if function is None:
        raise MissingKernelError(
            f"the platform sm120_sim has no torch version of the Triton kernel {path} "
            f"(parameters {', '.join(kernel.arg_names)}); this SGLang release or option needs one"
        )
    values = {name: value for name, value in kwargs.items() if name not in _TRITON_OPTIONS}
    bound = kernel.signature.bind(*args, **values)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    if set(arguments) != _parameters(function):
        raise MissingKernelError(mismatch(path) or f"{path} was launched with {sorted(arguments)}")
    if _GRID in inspect.signature(function).parameters:
        arguments[_GRID] = grid(arguments) if callable(grid) else grid
    function(**arguments)
