"""Finding and compiling the CUDA library: the digest follows the sources, and a missing nvcc is said in one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sglang_sm120.comm import cuda_library


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
