"""The thread engine under ThreadSanitizer, and a build with two slots that the soak must reject."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = ("cta", "engine", "fabric", "failure", "lanes", "soak", "world", "world_threads")
MAIN = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include "host/soak.h"
using namespace sm120;
int main(int, char** argv) {
  host::SoakConfig config;
  const int world = atoi(argv[1]);
  config.world.topology = parse_islands(world, argv[2], static_cast<int>(strlen(argv[2]))).topology;
  config.world.capacity = config.world.small = 1 << 16;
  config.world.timeout_ns = 60'000'000'000;
  config.world.longest_stall_ns = 100'000;
  config.threads = atoi(argv[3]) != 0;
  config.calls = strtoull(argv[4], nullptr, 10);
  config.world.seed = config.seed = 5;
  config.most_hidden = 264;
  config.most_rows = 2;
  if (!config.threads) {
    config.world.timeout_ns = 10'000'000;
    config.world.fabric = host::FabricConfig{5, 500, 3000, 0, 4, true};
  }
  try {
    printf("checked %llu\\n", static_cast<unsigned long long>(host::soak(config)));
  } catch (const std::exception& error) {
    printf("failed: %s\\n", error.what());
    return 3;
  }
}
"""


def build(folder: Path, *flags: str) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    (folder / "main.cpp").write_text(MAIN)
    program = folder / "soak"
    sources = [str(CSRC / "host" / f"{name}.cpp") for name in SOURCES]
    line = [compiler, "-std=c++20", "-O1", "-ffp-contract=off", *flags, f"-I{CSRC}"]
    line += [*sources, str(folder / "main.cpp"), "-o", str(program), "-pthread"]
    subprocess.run(line, check=True, timeout=400)
    return program


def test_thread_sanitizer_sees_no_race_in_the_thread_engine(tmp_path: Path) -> None:
    # Lanes of slabs are relaxed atomics in this build: whatever else ranks share must be ordered by them.
    program = build(tmp_path, "-fsanitize=thread", "-DSM120_LANE_ATOMICS", "-g")
    for world, layout in (("2", ""), ("4", "0,1;2,3")):
        run = subprocess.run(
            [program, world, layout, "1", "128"], capture_output=True, text=True, timeout=300
        )
        assert "WARNING: ThreadSanitizer" not in run.stderr, run.stderr[:4000]
        assert run.returncode == 0, run.stdout + run.stderr[:2000]
        assert "checked 128" in run.stdout


def test_two_slots_fail_the_soak_that_three_slots_pass(tmp_path: Path) -> None:
    arguments = ("3", "", "0", "1280")
    outcomes = {}
    for slots in (2, 3):
        folder = tmp_path / str(slots)
        folder.mkdir()
        program = build(folder, f"-DSM120_SLOTS={slots}", "-DSM120_LANE_ATOMICS")
        run = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
        outcomes[slots] = (run.returncode, run.stdout)
    assert outcomes[3] == (0, "checked 1280\n")
    assert outcomes[2][0] == 3 and "failed: seed 5" in outcomes[2][1]
