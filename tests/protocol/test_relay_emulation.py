"""The relay kernel itself (csrc/cuda/relay.cuh), run on the CPU: CUDA threads as fibers in random order, late stores.

What a GPU does with it is shown by tests/gpu/test_relay.py; this shows the kernel's logic: offsets, flags, fences,
barriers, every dtype, epilogue and form, calls of random shapes one after another, and a missing rank.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"


def _cuda_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    for root in (Path(nvcc).resolve().parents[1] if nvcc else None, Path("/usr/local/cuda")):
        if root is not None and (root / "include" / "cuda_fp8.h").exists():
            return root / "include"
    return None


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, headers = shutil.which("g++"), _cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("needs g++ and CUDA's headers")
    folder = tmp_path_factory.mktemp("relay")
    shutil.copytree(CSRC / "core", folder / "core")
    shutil.copytree(CSRC / "cuda", folder / "cuda")
    shutil.copy(HERE / "relay_emulation" / "ptx.cuh", folder / "cuda" / "ptx.cuh")
    program = folder / "emulate"
    done = subprocess.run(
        [
            compiler, "-std=c++20", "-O1", "-w", "-ffp-contract=off", f"-I{folder}", f"-I{headers}",
            str(HERE / "relay_emulation" / "main.cpp"), "-o", str(program),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return program


def run(emulator: Path, *arguments: object) -> str:
    done = subprocess.run(
        [str(emulator), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize(("world", "calls"), [(2, 40), (3, 30), (4, 20), (7, 8), (16, 3)])
def test_random_calls_give_the_canonical_bits_and_leave_the_tile_slots_clear(
    emulator: Path, world: int, calls: int
) -> None:
    out = run(emulator, world, calls, world)
    assert f"RIGHT {calls} calls, 0 wrong" in out, out


@pytest.mark.parametrize("world", [2, 4])
def test_without_the_fence_a_reader_takes_what_has_not_arrived(emulator: Path, world: int) -> None:
    assert "WRONG" in run(emulator, world, 8, 1, "nofence")


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_missing_rank_is_named_and_everyone_ends_with_nan(
    emulator: Path, missing: int, seed: int
) -> None:
    out = run(emulator, 3, 1, seed, "fences", missing)
    for rank in {0, 1, 2} - {missing}:
        assert f"ENDED rank {rank} with NaN" in out, out
        assert f"FAILED rank {rank}:" in out, out
    # Whoever gave up by itself, not because told to, names the missing rank.
    reasons = [line for line in out.splitlines() if "why 1 " in line]
    assert reasons and all(line.endswith(f"waits for {missing}") for line in reasons), out


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_many_more_calls(emulator: Path, seed: int) -> None:
    assert "RIGHT" in run(emulator, 2 + seed % 7, 40, 100 + seed)
