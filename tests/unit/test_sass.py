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
    return _compile("flat_one_shot_2.cu", request.param, tmp_path_factory.mktemp("sass"))


@pytest.fixture(scope="module", params=["90", "120"])
def relay(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """The same of the relay kernels."""
    return _compile("relay.cu", request.param, tmp_path_factory.mktemp("relay"))


def _compile(source: str, architecture: str, folder: Path) -> tuple[str, Path]:
    assert NVCC is not None
    target = "120f" if architecture == "120" else architecture
    output = folder / f"sm_{target}.o"
    done = subprocess.run(
        [
            NVCC, "-std=c++20", "-O3", f"-gencode=arch=compute_{target},code=sm_{target}", "-Xptxas", "-v",
            f"-I{CSRC}", "-c", str(CSRC / "cuda" / source), "-o", str(output),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr, output


def _functions(path: Path) -> list[tuple[str, list[str]]]:
    """(name, lines) of every kernel in an object file."""
    tool = _disassembler()
    if tool is None:
        pytest.skip("no cuobjdump (a CUDA toolkit or the triton package has it)")
    listing = subprocess.run(
        [tool, "-sass", str(path)], capture_output=True, text=True, check=True
    ).stdout
    return [
        (function.partition("\n")[0], function.splitlines()[1:])
        for function in listing.split("Function : ")[1:]
    ]


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
    seen = 0
    for name, lines in _functions(compiled[1]):
        if "flat_kernel" not in name or "OutputE2" in name:
            continue
        seen += 1
        pushes = [line for line in lines if re.search(r"\bST[G.]?\S*STRONG\.SYS", line)]
        wide = [line for line in pushes if ".128" in line]
        assert wide, name
        outputs = [i for i, line in enumerate(lines) if re.search(r"\bSTG\.E\.128 ", line)]
        fences = [i for i, line in enumerate(lines) if "MEMBAR" in line and ".SYS" in line]
        assert outputs and all(fence > max(outputs) for fence in fences), name
    assert seen >= 12


def test_the_relay_keeps_to_64_registers(relay: tuple[str, Path]) -> None:
    report, path = relay
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert len(registers) == 9 and max(registers) <= 64
    kernels = re.findall(
        r"Compiling entry function '(\S+)'[^\n]*\n.*?(\d+) bytes spill stores", report, flags=re.S
    )
    # sm_90 has none; for sm_120 the assembler keeps a row's invariants on the stack (72 bytes at most).
    most = 80 if "120" in path.name else 0
    assert len(kernels) == 9 and all(int(spill) <= most for _, spill in kernels), kernels


def test_the_relay_stores_wide_and_fences_before_every_flag(relay: tuple[str, Path]) -> None:
    kernels = [(name, lines) for name, lines in _functions(relay[1]) if "relay_kernel" in name]
    assert len(kernels) == 9
    for name, lines in kernels:
        stores = [line for line in lines if re.search(r"\bSTG\S*STRONG\.SYS", line)]
        assert sum(".128" in line for line in stores) >= 4, name
        flags = [i for i, line in enumerate(lines) if re.search(r"\bSTG\.E\.64\.STRONG\.SYS", line)]
        fences = [i for i, line in enumerate(lines) if "MEMBAR" in line and ".SYS" in line]
        # One fence for the flags of a step, close before them: no store of data comes between.
        assert len(fences) == 1 and len(flags) == 2, (name, fences, flags)
        assert all(0 < flag - fences[0] < 80 for flag in flags), (name, fences, flags)
        between = lines[fences[0] : max(flags)]
        assert not any(re.search(r"\bST\S*\.128", line) for line in between), name
        # Flags are awaited by acquiring loads: a strong load, then the L1 invalidated.
        polls = [i for i, line in enumerate(lines) if re.search(r"\bLDG\.E\.64\.STRONG\.SYS", line)]
        assert any("CCTL.IVALL" in line for i in polls for line in lines[i : i + 8]), name
