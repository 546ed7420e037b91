"""Ranks that share a GPU: FlashInfer's tuner only tries launches of which all ranks' CTAs are resident together."""

from __future__ import annotations

import enum
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang_sm120.hooks import shared_gpu

SWITCH = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"


class IpcVariant(enum.IntEnum):
    UNSTAGED = 0
    COPY_ENGINE_RING = 4


def candidate_tactics(world_size: int, max_blocks: int = 128) -> tuple[tuple[int, int, int], ...]:
    return tuple((v, c, t) for v in IpcVariant for c in (1, 16, 128) for t in (64, 1024))


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A FlashInfer with a tuner, and a GPU of 132 multiprocessors."""
    module = ModuleType("flashinfer.comm.pcie_ipc_tuning")
    module.IpcVariant = IpcVariant  # type: ignore[attr-defined]
    module.candidate_tactics = candidate_tactics  # type: ignore[attr-defined]
    comm = ModuleType("flashinfer.comm")
    comm.pcie_ipc_tuning = module  # type: ignore[attr-defined]
    for name, fake in (("flashinfer", ModuleType("flashinfer")), ("flashinfer.comm", comm)):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return module


def test_the_tuner_keeps_what_fits(tuning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    shared_gpu.fit_tuner()
    # Half of 132 for 4 ranks: 16 CTAs each, whatever their size.
    assert tuning.candidate_tactics(4, max_blocks=128) == (
        (0, 1, 64), (0, 1, 1024), (0, 16, 64), (0, 16, 1024),
    )  # fmt: skip
    # 8 ranks: 8 CTAs each.
    assert {ctas for _, ctas, _ in tuning.candidate_tactics(8)} == {1}


def test_without_the_switch_or_flashinfer_nothing_changes(
    tuning: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    shared_gpu.fit_tuner()
    assert tuning.candidate_tactics is candidate_tactics
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setitem(sys.modules, "flashinfer.comm", None)
    shared_gpu.fit_tuner()
    assert tuning.candidate_tactics is candidate_tactics


def test_a_rank_prints_its_stacks_when_asked() -> None:
    program = (
        "import os, signal, sys\n"
        "from sglang_sm120.hooks import shared_gpu\n"
        "shared_gpu.print_stacks_when_asked()\n"
        "def waits_for_the_others():\n"
        "    os.kill(os.getpid(), signal.SIGUSR2)\n"
        "waits_for_the_others()\n"
        "print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "in waits_for_the_others" in done.stderr
    assert done.stdout == "still here\n"
