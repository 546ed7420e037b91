"""GPU tests: skipped, with the reason, where there is no GPU or no CUDA library."""

from __future__ import annotations

from pathlib import Path

import pytest


def _reason() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU in this machine"
    from sglang_sm120.comm.cuda_library import CudaLibraryMissing, cuda_library

    try:
        cuda_library()
    except CudaLibraryMissing as missing:
        return str(missing)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    if not mine:
        return
    reason = _reason()
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
