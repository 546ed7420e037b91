"""Apply the patches of docs/upstream to a copy of the installed SGLang, and check them there.

For each patch alone and for the whole series in order: it applies, SGLang's formatters have nothing to say
about the files it changes, and its own tests pass. Then the plugin runs on the patched trees: its contract
report and its tests of the seams with patches 1 and 2 and with the series, real servers on the CPU with the
series. The installed package is only read. Needs no GPU and no network.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "docs" / "upstream"
SGLANG_VERSION = "0.5.23"
# What SGLang's pre-commit enforces, as ruff states it: its formatter, isort's profile "black", no dead import.
RUFF_LINT = (
    "--isolated",
    "--select=I,F401,F821",
    '--config=lint.isort.known-first-party=["sglang"]',
    "--output-format=concise",
)
# What SGLang's own configuration lets pass.
CODESPELL_IGNORES = ("cann", "thi", "makro", "wil", "rouge", "PRIS")  # codespell:ignore
CLANG_SUFFIXES = (".cuh", ".cu", ".h", ".cpp")
# The first two patches are what the plugin needs for its flags and its fused kernels.
PLUGIN_SEAMS = "seams-01-02"
# One server for each way in (command line, `sglang serve`, Engine) and the unfused one to compare with; the other ways
# of test_serving.py run on the installed SGLang in `make test`, and here with `--servers all`.
CHOSEN_SERVERS = "llama-eagle3-fused or llama-eagle3-stock or eagle3-llama or llama-plain-fused or deepseek-plain-fused"
# SGLang's documentation is not part of the wheel, so these parts of the patches are read but not applied.
DOCUMENTATION = "docs_new"
# Every heading of SGLang's pull request template.
TEMPLATE = (
    "## Motivation",
    "## Modifications",
    "## Accuracy Tests",
    "## Speed Tests and Profiling",
    "## Checklist",
    "## Review and Merge Process",
)


class CheckError(Exception):
    """A patch or a tree failed a check; the message says which, and how to see more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; returns 1 and prints every failure when there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sglang", type=Path, help="the sglang package to copy (default: the installed one)"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "upstream", help="scratch folder"
    )
    parser.add_argument("--jobs", type=int, default=2, help="trees tested at the same time")
    parser.add_argument("--no-tests", action="store_true", help="apply and format only")
    parser.add_argument(
        "--servers",
        choices=("none", "chosen", "all"),
        default="chosen",
        help="which of the plugin's server tests run on the series",
    )
    options = parser.parse_args(argv)

    started = time.monotonic()
    sglang = options.sglang or installed_sglang()
    patches = sorted(PATCHES.glob("[0-9][0-9]-*/*.patch"))
    if not patches:
        raise SystemExit(f"no patch under {PATCHES}")
    failures: list[str] = []

    for patch in patches:
        failures += template_gaps(patch.parent) + documentation_gaps(patch)
    base = options.work / "base"
    copy_package(sglang, base)
    trees: list[tuple[str, Path, list[Path]]] = []
    wanted = [(p.parent.name, [p]) for p in patches]
    wanted += [(PLUGIN_SEAMS, patches[:2]), ("series", patches)]
    for name, chosen in wanted:
        tree = options.work / name
        try:
            build_tree(base, tree, chosen)
            failures += format_gaps(base, tree, name)
        except CheckError as error:
            failures.append(str(error))
        else:
            trees.append((name, tree, chosen))
            print(f"{name}: applied", flush=True)

    if not options.no_tests:
        failures += test_trees(trees, options.jobs, options.servers)

    for failure in failures:
        print(f"\nFAILED {failure}", file=sys.stderr)
    print(f"{len(patches)} patches, {len(failures)} failures, {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


def test_trees(trees: list[tuple[str, Path, list[Path]]], jobs: int, servers: str) -> list[str]:
    """SGLang's tests of each tree, then the plugin's on the trees it shrinks on; returns the failures."""
    failures = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        # The series takes longest, so it starts first. The pair's tests are those of its patches.
        runs = {
            pool.submit(run_sglang_tests, tree): name
            for name, tree, _ in reversed(trees)
            if name != PLUGIN_SEAMS
        }
        for run in concurrent.futures.as_completed(runs):
            code, output = run.result()
            print(f"{runs[run]}: {summary(output)}", flush=True)
            if code != 0:
                failures.append(f"{runs[run]}: its tests fail\n{output}")
    for name, tree, patches in trees:
        if name in (PLUGIN_SEAMS, "series"):
            failures += contract_report(tree, name)
            failures += run_plugin_tests(tree, patches, ["tests/upstream", "-m", "not server"])
    if servers != "none" and trees and trees[-1][0] == "series":
        _, tree, patches = trees[-1]
        chosen = [] if servers == "all" else ["-k", CHOSEN_SERVERS]
        failures += run_plugin_tests(tree, patches, ["tests/server/test_serving.py", *chosen])
        failures += run_plugin_tests(tree, patches, ["tests/upstream", "-m", "server"])
    return failures


def contract_report(tree: Path, name: str) -> list[str]:
    """Print which of the plugin's hooks the tree makes unnecessary; a target that does not fit is a failure."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang_sm120.hooks.report"],
        cwd=tree,
        env={**environment(tree), "COLUMNS": "150"},
        capture_output=True,
        text=True,
    )
    (tree / "contract.txt").write_text(done.stdout)
    print(f"{name}: the plugin's hooks ({tree / 'contract.txt'})\n{done.stdout}", flush=True)
    if done.returncode != 0:
        return [f"{name}: the plugin's hooks do not fit\n{done.stdout}{done.stderr}"]
    return []


def installed_sglang() -> Path:
    """The installed package's folder, found without importing it; checks the version the patches are for."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise SystemExit("sglang is not installed here; give --sglang or run `make setup`")
    folder = Path(spec.origin).parent
    version = re.search(
        r"^__version__ = version = '([^']+)'", (folder / "_version.py").read_text(), re.M
    )
    if version is None or version[1] != SGLANG_VERSION:
        found = version[1] if version else "an unknown version"
        raise SystemExit(f"{folder} is sglang {found}; the patches are for {SGLANG_VERSION}")
    return folder


def template_gaps(folder: Path) -> list[str]:
    """Headings of SGLang's template that the pull request's text lacks."""
    text = folder / "pull-request.md"
    if not text.exists():
        return [f"{folder.name}: no pull-request.md"]
    lines = text.read_text().splitlines()
    return [f"{text}: the section {head!r} is missing" for head in TEMPLATE if head not in lines]


def documentation_gaps(patch: Path) -> list[str]:
    """New fields of `ServerArgs` that the patch's own part of SGLang's documentation does not name."""
    parts = re.split(r"^(?=diff --git )", patch.read_text(), flags=re.M)
    order = "".join(part for part in parts if "/field_order.py" in part.partition("\n")[0])
    pages = "".join(part for part in parts if part.startswith(f"diff --git a/{DOCUMENTATION}"))
    fields = re.findall(r'^\+    "(\w+)",$', order, flags=re.M)
    return [
        f"{patch.name}: {DOCUMENTATION} says nothing of {field}"
        for field in fields
        if f"--{field.replace('_', '-')}" not in pages and field not in pages
    ]


def copy_package(sglang: Path, base: Path) -> None:
    """A private copy laid out as SGLang's repository. Compiled Python comes along, so that tests start quickly."""
    shutil.rmtree(base.parent, ignore_errors=True)
    shutil.copytree(sglang, base / "python" / "sglang", symlinks=True)


def build_tree(base: Path, tree: Path, patches: Sequence[Path]) -> None:
    """Hard links to the copy, then the patches in order; git replaces the files it changes, so no link is written."""
    shutil.copytree(base, tree, symlinks=True, copy_function=os.link)
    for patch in patches:
        # Without the ceiling, git would find this repository above the tree and apply nothing there.
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
        done = subprocess.run(
            ["git", "apply", "--whitespace=error-all", f"--exclude={DOCUMENTATION}/*", str(patch)],
            cwd=tree,
            env=env,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise CheckError(f"{tree.name}: {patch.name} does not apply\n{done.stderr}")


def changed_files(base: Path, tree: Path) -> list[Path]:
    """Files of the tree that are not links to the base's, relative to it."""
    return sorted(
        path.relative_to(tree)
        for path in tree.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not (
            (base / path.relative_to(tree)).exists()
            and path.samefile(base / path.relative_to(tree))
        )
    )


def format_gaps(base: Path, tree: Path, name: str) -> list[str]:
    """What SGLang's formatters would change or refuse, in the files that the patches touch."""
    files = changed_files(base, tree)
    if not files:
        raise CheckError(f"{name}: the patches change nothing")
    gaps = []
    python = [str(f) for f in files if f.suffix == ".py"]
    gaps += findings(tree, ["ruff", "format", "--isolated", "--check", "--diff", *python])
    # Some of SGLang's own files import for re-export; only what a patch adds counts.
    before = set(lint(base, [f for f in python if (base / f).exists()]))
    gaps += [finding for finding in lint(tree, python) if finding not in before]
    sources = [str(f) for f in files if f.suffix in CLANG_SUFFIXES]
    if sources:
        gaps += findings(tree, ["clang-format", "--style=file", "--dry-run", "--Werror", *sources])
    gaps += findings(tree, ["codespell", "-L", ",".join(CODESPELL_IGNORES), *map(str, files)])
    return [f"{name}: {gap}" for gap in gaps]


def findings(tree: Path, command: list[str]) -> list[str]:
    """The tool's output as one finding when it fails; the tool comes from this interpreter's environment."""
    tool = Path(sys.executable).parent / command[0]
    if not tool.exists():
        return [f"{command[0]} is missing beside {sys.executable}; run `make setup`"]
    done = subprocess.run([str(tool), *command[1:]], cwd=tree, capture_output=True, text=True)
    return [] if done.returncode == 0 else [f"{command[0]}\n{done.stdout}{done.stderr}"]


def lint(tree: Path, files: list[str]) -> list[str]:
    """Ruff's findings without their line numbers, which a patch moves."""
    if not files:
        return []
    tool = str(Path(sys.executable).parent / "ruff")
    done = subprocess.run(
        [tool, "check", *RUFF_LINT, *files], cwd=tree, capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        raise CheckError(f"ruff check failed in {tree}\n{done.stderr}")
    return [
        re.sub(r":\d+:\d+:", ":", line)
        for line in done.stdout.splitlines()
        if re.search(r":\d+:\d+: ", line)
    ]


def run_sglang_tests(tree: Path) -> tuple[int, str]:
    """The tests that the patches add, as SGLang's CPU stage would run them; returns exit code and output."""
    tests = sorted(str(p.relative_to(tree)) for p in tree.glob("test/registered/**/test_*.py"))
    if not tests:
        return 1, f"{tree.name}: the patches add no test"
    # SGLang's own settings do not reach the wheel; an empty file keeps this project's away.
    (tree / "pytest.ini").write_text("[pytest]\n")
    return pytest(tree, tree, ["-W", "ignore", *tests])


def run_plugin_tests(tree: Path, patches: Sequence[Path], tests: list[str]) -> list[str]:
    """This project's tests with the patched SGLang in front of the installed one."""
    names = ",".join(patch.parent.name for patch in patches)
    code, output = pytest(tree, ROOT, tests, {"SM120_UPSTREAM_PATCHES": names})
    print(f"{tree.name}, plugin, {' '.join(tests)}: {summary(output)}", flush=True)
    # 5: nothing selected, which would be a check that cannot fail.
    return [] if code == 0 else [f"the plugin's {' '.join(tests)} fail on {tree.name}\n{output}"]


def summary(output: str) -> str:
    """Pytest's last line; interpreters may print more after it."""
    lines = output.strip().splitlines() or ["no output"]
    return next((line for line in reversed(lines) if re.search(r" in \d+\.\d+s", line)), lines[-1])


def environment(tree: Path) -> dict[str, str]:
    """This process's environment with the tree's SGLang in front."""
    path = os.pathsep.join(filter(None, [str(tree / "python"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "SM120_UPSTREAM_TREE": str(tree)}


def pytest(
    tree: Path, cwd: Path, arguments: list[str], more: Mapping[str, str] | None = None
) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=cwd,
        env={**environment(tree), **(more or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
