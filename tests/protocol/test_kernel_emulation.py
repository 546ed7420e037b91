"""The CUDA kernels themselves, run on the CPU: CUDA threads as fibers in random order, stores that arrive late.

What a GPU does with them is shown by tests/gpu; this shows their logic on every machine: offsets, slots and their
clearing, epochs and their wrap, flags, fences, barriers, every schedule, island layout, dtype, codec and epilogue, calls
of random shapes and kernels one after another, and a missing rank. Left out: clusters (distributed shared memory) and
what the hardware adds, such as the GPU's own rounding of approximate instructions.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
SOURCES = HERE / "kernel_emulation"

# name -> (program, macros, changes to the kernels: (file, text, replacement)). WORLD is what flat kernels are made for.
BUILDS: dict[str, tuple[str, list[str], list[tuple[str, str, str]]]] = {
    "flat 4": ("tiles.cpp", ["-DWORLD=4"], []),
    "flat 2": ("tiles.cpp", ["-DWORLD=2"], []),
    "general": ("tiles.cpp", ["-DWORLD=0"], []),
    "relay": ("relay.cpp", [], []),
    # Negative controls: each must be seen.
    "two slots": ("tiles.cpp", ["-DWORLD=0", "-DSM120_SLOTS=2"], []),
    "uncleared": (
        "tiles.cpp", ["-DWORLD=0"],
        [("general.cuh", "clear_units(base, state.reduce, me, threads);", "")],
    ),
    "unguarded": (
        "tiles.cpp", ["-DWORLD=0"],
        [("general.cuh", "__syncthreads();  // before the next row's statistics", "")],
    ),
}  # fmt: skip
SOAK_BUILDS = {"flat 8": ("tiles.cpp", ["-DWORLD=8"], [])}


def _cuda_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    for root in (Path(nvcc).resolve().parents[1] if nvcc else None, Path("/usr/local/cuda")):
        if root is not None and (root / "include" / "cuda_fp8.h").exists():
            return root / "include"
    return None


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a build by name; those of `BUILDS` are all under way, two at a time."""
    compiler, headers = shutil.which("g++"), _cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("needs g++ and CUDA's headers")
    root = tmp_path_factory.mktemp("kernels")

    def build(name: str) -> Path:
        source, macros, changes = (BUILDS | SOAK_BUILDS)[name]
        folder = root / name.replace(" ", "-")
        shutil.copytree(CSRC / "core", folder / "core")
        shutil.copytree(CSRC / "cuda", folder / "cuda")
        shutil.copy(SOURCES / "ptx.cuh", folder / "cuda" / "ptx.cuh")
        for file, text, replacement in changes:
            path = folder / "cuda" / file
            before = path.read_text()
            assert before.count(text) == 1, f"{name}: {file} no longer has {text!r} once"
            path.write_text(before.replace(text, replacement))
        done = subprocess.run(
            [
                compiler, "-std=c++20", "-O1", "-w", "-ffp-contract=off", *macros, f"-I{folder}", f"-I{headers}",
                str(SOURCES / source), "-o", str(folder / "emulate"),
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return folder / "emulate"

    pool = ThreadPoolExecutor(2)
    builds: dict[str, Future[Path]] = {name: pool.submit(build, name) for name in BUILDS}

    def get(name: str) -> Path:
        if name not in builds:
            builds[name] = pool.submit(build, name)
        return builds[name].result()

    return get


def run(emulator: Path, *arguments: object) -> str:
    done = subprocess.run(
        [str(emulator), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, 1), (done.returncode, done.stderr)
    return done.stdout


def expect_right(emulator: Path, calls: int, *arguments: object) -> None:
    out = run(emulator, *arguments)
    assert f"RIGHT {calls} calls, 0 wrong" in out, out


# --- relay ---


@pytest.mark.parametrize(("world", "calls"), [(2, 40), (3, 30), (4, 20), (7, 8), (16, 3)])
def test_relay_calls_give_the_canonical_bits_and_leave_the_tile_slots_clear(
    program: Callable[[str], Path], world: int, calls: int
) -> None:
    expect_right(program("relay"), calls, world, calls, world)


@pytest.mark.parametrize("world", [2, 4])
def test_without_the_fence_a_reader_takes_what_has_not_arrived(
    program: Callable[[str], Path], world: int
) -> None:
    assert "WRONG" in run(program("relay"), world, 8, 1, "nofence")


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_missing_rank_is_named_by_the_relay_and_everyone_ends_with_nan(
    program: Callable[[str], Path], missing: int, seed: int
) -> None:
    out = run(program("relay"), 3, 1, seed, "fences", missing)
    everyone_but(missing, 3, out)
    # Whoever gave up by itself, not because told to, names the missing rank.
    reasons = [line for line in out.splitlines() if "why 1 " in line]
    assert reasons and all(line.endswith(f"waits for {missing}") for line in reasons), out


def everyone_but(missing: int, world: int, out: str) -> None:
    for rank in set(range(world)) - {missing}:
        assert f"ENDED rank {rank} with NaN" in out, out
        assert f"FAILED rank {rank}:" in out, out


# --- tiles ---

GENERAL = [
    (3, "", 24), (3, "0;1,2", 24), (5, "0,1;2,3,4", 16), (6, "0-2;3-5", 12), (7, "", 8), (8, "0,1;2,3;4,5;6,7", 8),
    (16, "0-3;4-7;8-11;12-15", 3),
]  # fmt: skip
FLAT = [
    ("flat 2", 2, "", 60), ("flat 4", 4, "", 40), ("flat 4", 4, "0,1;2,3", 16), ("flat 4", 4, "0,3;1,2", 16),
    ("flat 4", 4, "0;1;2;3", 12),
]  # fmt: skip


@pytest.mark.parametrize(("world", "islands", "calls"), GENERAL)
def test_general_calls_give_the_canonical_bits_and_clear_their_slots(
    program: Callable[[str], Path], world: int, islands: str, calls: int
) -> None:
    for seed in (7, 8):  # as mailboxes, and as memory of GPUs
        expect_right(program("general"), calls, world, islands, calls, seed)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("build", "world", "islands", "calls"), FLAT)
def test_flat_and_general_calls_follow_each_other_in_the_same_slabs(
    program: Callable[[str], Path], build: str, world: int, islands: str, calls: int, seed: int
) -> None:
    expect_right(program(build), calls, world, islands, calls, seed)


@pytest.mark.parametrize(
    ("build", "calls", "seed"), [("two slots", 40, 3), ("uncleared", 8, 3), ("unguarded", 24, 3)]
)
def test_what_the_emulation_is_for_it_sees(
    program: Callable[[str], Path], build: str, calls: int, seed: int
) -> None:
    assert "BAD" in run(program(build), 3, "0;1,2", calls, seed)


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize(
    ("build", "world", "islands"),
    [("general", 3, ""), ("general", 3, "0;1,2"), ("flat 2", 2, ""), ("flat 4", 4, "")],
)
def test_without_a_rank_everyone_ends_with_nan_and_reports(
    program: Callable[[str], Path], build: str, world: int, islands: str, seed: int
) -> None:
    for missing in range(world):
        everyone_but(missing, world, run(program(build), world, islands, 1, seed, missing))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_many_more_relay_calls(program: Callable[[str], Path], seed: int) -> None:
    assert "RIGHT" in run(program("relay"), 2 + seed % 7, 40, 100 + seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("build", "world", "islands"),
    [("flat 2", 2, ""), ("flat 4", 4, ""), ("flat 8", 8, ""), ("general", 9, "0-2;3-5;6-8")],
)
def test_many_more_calls_in_tiles(
    program: Callable[[str], Path], build: str, world: int, islands: str, seed: int
) -> None:
    expect_right(program(build), 12, world, islands, 12, 100 + seed)
