"""Pack SGLang, FlashInfer's PCIe all-reduce, NCCL 2.30 and this plugin for a GPU machine without a network.

    python tools/gpu_bundle/make.py OUT --architecture 90
    # there: bash OUT/install.sh OUT INTO; . INTO/env.sh; python -m sglang_sm120.cli.main demo --gpu --ranks 4

The machine must have Python 3.12, torch 2.11 for CUDA 13, triton, transformers, nvcc and MPS. Parts stay below 60 MiB
each. Here: pip with a package index, nvcc, strip and xz.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tomllib
import typer
from fatbin import keep_only

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PART_LIMIT = 60 << 20
# The newest sgl_kernel that is built for torch 2.11; SGLang's version check is off in env.sh.
SGL_KERNEL = "sglang-kernel==0.4.5"
NCCL = "nvidia-nccl-cu13==2.30.7"
FLASHINFER = "flashinfer-python==0.7.4"
GLIBC = (39, 38, 37, 36, 35, 34, 33, 32, 31, 30, 29, 28, 27, 26, 24, 17, 12, 5)
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]  # fmt: skip
# Modules that SGLang imports and a text server never calls: an empty one each.
STUBS = {
    "IPython/__init__.py": "",
    "IPython/display.py": "HTML = display = None\n",
    "soundfile/__init__.py": "",
    "flash_mla/__init__.py": "def __getattr__(name):\n    return None\n",
    "flash_mla/flash_mla_interface.py": "class FlashMLASchedMeta:\n    pass\n",
}
# SGLang's dual GEMM wants the CuTe DSL, which is left out.
BUNDLE_PLUGIN = '''\
"""SGLang plugin of the bundle: no dual GEMM, whose compiler is not here."""

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register():
    HookRegistry.register(
        "sglang.srt.layers.dual_gemm.DualGemm._select_mode",
        lambda self, *args, **kwargs: None,
        HookType.REPLACE,
    )
'''
UNUSED = (
    "sglang/multimodal_gen", "sglang/test", "sglang/srt/rust_extensions", "sglang/srt/mem_cache/rust_tree_core",
    "tvm_ffi/3rdparty", "zstandard/_cffi.cpython-312-x86_64-linux-gnu.so",
)  # fmt: skip


def fetch(pins: list[str], into: Path) -> list[Path]:
    """Wheels of the pins for Python 3.12 on x86-64, downloaded unless they are there."""
    into.mkdir(parents=True, exist_ok=True)
    out = []
    for pin in pins:
        name, _, version = pin.partition("==")
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        found = sorted(into.glob(pattern))
        if not found:
            command = [
                sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                "--python-version", "3.12", "--implementation", "cp", "--dest", str(into), pin,
            ]  # fmt: skip
            subprocess.run([*command, *(a for p in PLATFORMS for a in ("--platform", p))], check=True)  # fmt: skip
            found = sorted(into.glob(pattern))
        out.append(found[0])
    return out


def unpack(wheel: Path, into: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Extract the files of a wheel whose names are wanted."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(into, [n for n in packed.namelist() if wanted(n) and ".data/" not in n])


def prune_gpu_code(library: Path, architecture: int) -> None:
    """Keep one architecture's GPU code in a shared library, and no symbols that only debuggers read."""
    data = bytearray(library.read_bytes())
    keep_only(data, architecture)
    library.write_bytes(data)
    subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)


def write_tree(files: dict[str, str], into: Path) -> None:
    for name, text in files.items():
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def plugin_metadata(name: str, version: str, points: dict[str, dict[str, str]]) -> dict[str, str]:
    """A dist-info folder with nothing but a name and entry points."""
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in points.items()]  # fmt: skip
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{folder}/entry_points.txt": "\n".join(lines),
    }


def stage_site(stage: Path, wheels: Path, architecture: int) -> None:
    """SGLang with what it needs, sgl_kernel for one architecture, stubs, and this plugin with its C++ sources."""
    pins = [p for p in (HERE / "wheels.txt").read_text().splitlines() if p and p[0] != "#"]
    for wheel in fetch(pins, wheels):
        unpack(wheel, stage)
    (kernel,) = fetch([SGL_KERNEL], wheels)
    unpack(kernel, stage, lambda n: n.endswith(".py") or f"/sm{architecture}/" in n or n.endswith("METADATA"))  # fmt: skip
    prune_gpu_code(stage / f"sgl_kernel/sm{architecture}/common_ops.abi3.so", architecture)
    for name in UNUSED:
        for path in sorted((stage / name).rglob("*.so") if "rust" in name else [stage / name]):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    write_tree(STUBS, stage)
    write_tree({"gpu_bundle_plugin.py": BUNDLE_PLUGIN}, stage)
    points = {"sglang.srt.plugins": {"gpu_bundle": "gpu_bundle_plugin:register"}}
    write_tree(plugin_metadata("gpu-bundle-plugin", "1", points), stage)
    skip = shutil.ignore_patterns("__pycache__", "_lib")
    shutil.copytree(ROOT / "python/sglang_sm120", stage / "sglang_sm120", ignore=skip)
    shutil.copytree(ROOT / "csrc", stage / "sglang_sm120/csrc")  # compiled at first use
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    write_tree(plugin_metadata(project["name"], project["version"], project["entry-points"]), stage)


def stage_flashinfer(stage: Path, wheels: Path, architecture: int) -> None:
    """FlashInfer's PCIe all-reduce, compiled here: its kernels' sources are a hundred times as large."""
    (wheel,) = fetch([FLASHINFER], wheels)
    sources = stage.parent / "flashinfer-sources"
    unpack(wheel, sources, lambda n: n.startswith(("flashinfer/data/include/", "flashinfer/data/csrc/")) and n.endswith((".h", ".cuh", ".hpp", "pcie_ipc_all_reduce.cu")))  # fmt: skip
    parts = tuple(f"flashinfer/{name}/" for name in ("comm", "autotuner", "jit", "trace"))
    unpack(
        wheel,
        stage,
        lambda n: n.endswith(".py") and (n.startswith(parts) or n.count("/") == 1),
    )
    # The package's own __init__ files import every kernel that FlashInfer has.
    write_tree(
        {
            # The library is linked without the driver, which is not on the machine that compiles it.
            "flashinfer/__init__.py": "import ctypes\n\nctypes.CDLL('libcuda.so.1', mode=ctypes.RTLD_GLOBAL)\n"
            f'__version__ = "{FLASHINFER.partition("==")[2]}"\n',
            "flashinfer/comm/__init__.py": "from .pcie_ipc_ar import PcieIpcAllReduceWorkspace\n",
        },
        stage,
    )
    data = sources / "flashinfer/data"
    include = [data / "include", data / "csrc"]
    built = stage / "flashinfer/data/aot"
    compile_module(
        built, "pcie_ipc_comm", data / "csrc/pcie_ipc_all_reduce.cu", include, architecture
    )
    compile_module(built, "trtllm_utils", HERE / "delay.cu", [], architecture)  # its tuner's delay


def compile_module(
    into: Path, name: str, source: Path, include: list[Path], architecture: int
) -> None:
    """A tvm-ffi module where FlashInfer looks for one that was compiled before: INTO/name/name.so."""
    import tvm_ffi.libinfo as info

    (into / name).mkdir(parents=True)
    ffi = Path(info.find_libtvm_ffi())
    folders = [*include, Path(info.find_include_path()), Path(info.find_dlpack_include_path())]
    subprocess.run(
        [
            "nvcc", "-shared", "-std=c++17", "-O3", "-w", "-Xcompiler=-fPIC",
            f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
            *(f"-I{folder}" for folder in folders), str(source), f"-L{ffi.parent}", "-ltvm_ffi",
            "-o", str(into / name / f"{name}.so"),
        ],
        check=True,
    )  # fmt: skip


def stage_nccl(stage: Path, wheels: Path, architecture: int) -> None:
    """NCCL 2.30, the first that serves several ranks of one GPU."""
    (wheel,) = fetch([NCCL], wheels)
    unpack(wheel, stage, lambda n: n.endswith("/libnccl.so.2"))
    library = next(stage.rglob("libnccl.so.2")).rename(stage / "libnccl.so.2")
    shutil.rmtree(stage / "nvidia")
    prune_gpu_code(library, architecture)


def pack(stage: Path, part: Path) -> None:
    """A reproducible archive of a folder.

    Raises:
        SystemExit: it is larger than a part may be.
    """
    listed = ["tar", "-C", str(stage), "--sort=name", "--owner=0", "--group=0", "--mtime=@0", "-cf", "-", "."]  # fmt: skip
    with part.open("wb") as out, subprocess.Popen(listed, stdout=subprocess.PIPE) as tar:
        subprocess.run(["xz", "-9", "-T0"], stdin=tar.stdout, stdout=out, check=True)
    if part.stat().st_size > PART_LIMIT:
        raise SystemExit(f"{part.name} has {part.stat().st_size >> 20} MiB; a part may have 60")


def main(
    out: Annotated[Path, typer.Argument(help="Folder for the parts; downloads are kept in OUT/.wheels.")],
    architecture: Annotated[int, typer.Option(help="The GPU's compute capability: 90 for 9.0.")] = 90,
) -> None:  # fmt: skip
    """Make the parts, their sums and the installer."""
    wheels, scratch = out / ".wheels", out / ".stage"
    shutil.rmtree(scratch, ignore_errors=True)
    sums = []
    for name, stage in (("site", stage_site), ("flashinfer", stage_flashinfer), ("nccl", stage_nccl)):  # fmt: skip
        folder = scratch / name
        folder.mkdir(parents=True)
        stage(folder, wheels, architecture)
        part = out / f"{name}.tar.xz"
        pack(folder, part)
        sums.append(f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}\n")
        print(f"{part.name}: {part.stat().st_size / (1 << 20):.1f} MiB")
    (out / "SHA256").write_text("".join(sums))
    shutil.copy(HERE / "install.sh", out)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    typer.run(main)
