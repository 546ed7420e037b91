"""Finding and compiling the CUDA library: the digest follows the sources, and a missing nvcc is said in one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sglang_sm120.comm import cuda_library
from sglang_sm120.fabric.software import run_ranks


def test_digest_follows_every_source_and_flag(tmp_path: Path) -> None:
    sources = cuda_library.source_dir()
    assert sources is not None
    copy = tmp_path / "csrc"
    for folder in ("core", "cuda", "ffi"):
        shutil.copytree(sources / folder, copy / folder)
    first = cuda_library.digest(copy, ["-O3"])
    assert first == cuda_library.digest(copy, ["-O3"])
    assert first != cuda_library.digest(copy, ["-O2"])
    header = copy / "core" / "tile.h"
    header.write_text(header.read_text() + "\n")
    assert first != cuda_library.digest(copy, ["-O3"])


def test_every_source_is_there_and_cmake_compiles_the_same() -> None:
    sources = cuda_library.source_dir()
    assert sources is not None
    cmake = (sources / "cuda" / "CMakeLists.txt").read_text()
    for name in cuda_library.SOURCES:
        assert (sources / name).exists()
        assert Path(name).name in cmake
    assert {p.name for p in (sources / "cuda").glob("*.cu")} == {
        Path(name).name for name in cuda_library.SOURCES if name.endswith(".cu")
    }


def test_without_nvcc_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_library.shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(cuda_library.CudaLibraryMissing, match="install a CUDA toolkit"):
        cuda_library.compile_now(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_library.shutil, "which", lambda *args, **kwargs: "/bin/false")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (12, 0))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(cuda_library.CudaLibraryMissing, match="nowhere to keep them.*file"):
        cuda_library.compile_now(tmp_path / "file" / "below")
    with pytest.raises(cuda_library.CudaLibraryMissing, match="nvcc could not compile"):
        cuda_library.compile_now(tmp_path)


NVCC = """#!/bin/sh
echo run >> "{log}"
sleep {seconds}
for argument; do last="$argument"; done
echo built > "$last"
"""


def fake_nvcc(monkeypatch: pytest.MonkeyPatch, folder: Path, seconds: float) -> Path:
    """An nvcc that takes its time; the file it notes its runs in."""
    nvcc, log = folder / "nvcc", folder / "runs"
    nvcc.write_text(NVCC.format(log=log, seconds=seconds))
    nvcc.chmod(0o755)
    monkeypatch.setattr(cuda_library.shutil, "which", lambda *args, **kwargs: str(nvcc))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (12, 0))
    return log


def test_of_many_ranks_one_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = fake_nvcc(monkeypatch, tmp_path, 0.5)
    built = run_ranks(4, lambda rank: cuda_library.compile_now(tmp_path / "cache"))
    assert len(set(built)) == 1 and built[0].read_text() == "built\n"
    assert log.read_text() == "run\n"


def test_an_nvcc_that_hangs_is_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvcc(monkeypatch, tmp_path, 5)
    monkeypatch.setattr(cuda_library, "COMPILE_S", 0.2)
    with pytest.raises(cuda_library.CudaLibraryMissing, match=r"not compile .* within 0\.2 s"):
        cuda_library.compile_now(tmp_path / "cache")
