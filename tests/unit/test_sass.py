"""What nvcc makes of the kernels: registers, spills, 16-byte stores, no system fence before the last output store."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
NVCC = shutil.which("nvcc")

pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")


def _disassembler() -> str | None:
    found = shutil.which("cuobjdump")
    if found is None:
        try:
            import triton

            found = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
        except ImportError:
            return None
    return found if Path(found).exists() else None


@pytest.fixture(scope="module", params=["90", "120"])
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """(ptxas report, object file) of the world-2 kernels for one architecture."""
    assert NVCC is not None
    target = "120f" if request.param == "120" else request.param
    output = tmp_path_factory.mktemp("sass") / f"sm_{target}.o"
    done = subprocess.run(
        [
            NVCC, "-std=c++20", "-O3", f"-gencode=arch=compute_{target},code=sm_{target}", "-Xptxas", "-v",
            f"-I{CSRC}", "-c", str(CSRC / "cuda" / "flat_one_shot_2.cu"), "-o", str(output),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr, output


def test_registers_and_spills(compiled: tuple[str, Path]) -> None:
    report = compiled[0]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert len(registers) >= 18 and max(registers) <= 64
    kernels = re.findall(
        r"Compiling entry function '(\S+)'[^\n]*\n.*?(\d+) bytes spill stores", report, flags=re.S
    )
    assert len(kernels) == len(registers)
    # bf16 sums and norms; FP8 output of four tiles per warp is left out.
    hot = [
        (name, int(spill)) for name, spill in kernels if "4Bf16" in name and "OutputE2" not in name
    ]
    assert len(hot) == 6 and all(spill == 0 for _, spill in hot), hot


def test_stores_are_wide_and_no_fence_comes_before_the_last_output(
    compiled: tuple[str, Path],
) -> None:
    tool = _disassembler()
    if tool is None:
        pytest.skip("no cuobjdump (a CUDA toolkit or the triton package has it)")
    listing = subprocess.run(
        [tool, "-sass", str(compiled[1])], capture_output=True, text=True, check=True
    ).stdout
    seen = 0
    for function in listing.split("Function : ")[1:]:
        name, _, body = function.partition("\n")
        if "flat_kernel" not in name or "OutputE2" in name:
            continue
        seen += 1
        lines = body.splitlines()
        pushes = [line for line in lines if re.search(r"\bST[G.]?\S*STRONG\.SYS", line)]
        wide = [line for line in pushes if ".128" in line]
        assert wide, name
        outputs = [i for i, line in enumerate(lines) if re.search(r"\bSTG\.E\.128 ", line)]
        fences = [i for i, line in enumerate(lines) if "MEMBAR" in line and ".SYS" in line]
        assert outputs and all(fence > max(outputs) for fence in fences), name
    assert seen >= 12
