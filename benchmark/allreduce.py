"""All-reduce, and all-reduce + residual + RMSNorm: our kernels and the rivals, one run, several processes on one GPU.

    python benchmark/allreduce.py --worlds 2,4 --rows 1,8,64 --json out.json

Under MPS with CUDA IPC this measures launch, polling and L2 traffic, not PCIe; on a machine with a GPU per rank the
same program measures the machine. Times are microseconds per call in CUDA graphs of 20 calls: median over replays of
the maximum over ranks, contenders in A-B-B-A order.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from sglang_sm120.sim.shared_gpu import mps

HERE = Path(__file__).resolve().parent
WORKER = HERE / "allreduce_worker.py"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_world(
    world: int, arguments: list[str], env: dict[str, str], seconds: float, worker: Path = WORKER
) -> list[dict[str, Any]]:
    """One set of ranks, each `worker RANK WORLD PORT ...`; what rank 0 reported, also when a rank hangs or dies."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(world), str(port), *arguments],
            env=env, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, text=True, start_new_session=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        out, err = ranks[0].communicate(timeout=seconds)
        for process in ranks[1:]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        _kill(ranks)
        out, err = ranks[0].communicate()
        err += f"\nworld {world}: killed after {seconds:.0f} s"
    finally:
        _kill(ranks)  # also when this program is told to end
    if "RESULT" not in out or '"done"' not in out:
        print(err[-3000:], file=sys.stderr)
    return [
        {"world": world, **json.loads(line[7:])}
        for line in out.splitlines()
        if line.startswith("RESULT ")
    ]


def _kill(ranks: list[subprocess.Popen[str]]) -> None:
    for process in ranks:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def end_on_sigterm() -> None:
    """SIGTERM ends this program like an exception, so that its ranks and its MPS end too."""

    def leave(*_: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, leave)


def bound_us(world: int, nbytes: int, link: dict[str, Any]) -> float:
    """Microseconds that the link needs for one all-reduce of `nbytes` per rank."""
    sharing, gbps = int(link["sharing"]), float(link["gbps"])
    return 2 * (world - 1) / world * nbytes * sharing / gbps / 1e3


def table(results: list[dict[str, Any]]) -> str:
    """Per world, operation and shape: every contender's time, and ours over the best rival's.

    With contenders in host memory also the link's bound: the bytes of the best lossless schedule, 2 (N - 1)/N S each way
    for each rank that shares the link, over the measured GB/s; and what part of it the best of them reaches. NCCL between
    ranks of one GPU never crosses the link, so it is then shown but not compared with.
    """
    links = {r["world"]: r for r in results if r["kind"] == "link"}
    finals = [r for r in results if r["kind"] == "final"]
    names = list(dict.fromkeys(r["contender"] for r in finals))
    ours_in_host = [n for n in names if n.startswith(("mailbox", "relay"))]
    rivals = [
        n for n in names if n != "native+fp8" and n not in ("native", *ours_in_host)
        and not n.endswith("(in GPU memory)")
    ]  # fmt: skip
    width = max([11, *map(len, names)])
    lines = [
        f"{'world':>5} {'op':>5} {'hidden':>6} {'rows':>4} "
        + " ".join(f"{n:>{width}}" for n in names)
        + "  ratio"
        + ("   bound  reached" if links else "")
    ]
    keys = list(dict.fromkeys((r["world"], r["op"], r["hidden"], r["rows"]) for r in finals))
    for key in sorted(keys):
        row = {
            r["contender"]: r
            for r in finals
            if (r["world"], r["op"], r["hidden"], r["rows"]) == key
        }
        ours = [row[n]["us"] for n in ("native", *ours_in_host) if n in row]
        theirs = [row[n]["us"] for n in rivals if n in row]
        ratio = f"{min(ours) / min(theirs):6.2f}" if ours and theirs else "     -"
        shown = " ".join(
            f"{row[n]['us']:{width}.2f}" if n in row else f"{'-':>{width}}" for n in names
        )
        lines.append(f"{key[0]:>5} {key[1]:>5} {key[2]:>6} {key[3]:>4} {shown} {ratio}")
        through = [row[n]["us"] for n in ours_in_host if n in row]
        if key[0] in links and through:
            bound = bound_us(key[0], key[2] * key[3] * 2, links[key[0]])
            lines[-1] += f" {bound:7.2f} {bound / min(through):7.0%}"
    return "\n".join(lines)


def title(results: list[dict[str, Any]]) -> str:
    """What the table measured and where."""
    text = "one GPU, several processes under MPS, CUDA IPC, graphs of 20 calls, us per call (max over ranks)"
    for link in (r for r in results if r["kind"] == "link"):
        text += f"\nlink to host memory at world {link['world']}: {link['gbps']} GB/s each way at once, shared by "
        text += f"{link['sharing']} rank(s)"
    return text


def main(
    worlds: Annotated[str, typer.Option(help="Numbers of ranks, each a run.")] = "2,4,8",
    rows: Annotated[str, typer.Option(help="Rows of the tensors.")] = "1,2,4,8,16,32,64",
    hidden: Annotated[str, typer.Option(help="Elements per row.")] = "7168,6144",
    contenders: Annotated[str, typer.Option(help="native, mailbox, relay_one_shot, relay_two_shot, pcie_ipc, trtllm, nccl.")] = "native,pcie_ipc,trtllm",
    sweep: Annotated[bool, typer.Option(help="Also time our kernels in many spreads.")] = False,
    screen: Annotated[bool, typer.Option(help="Keep every timed way of ours in the JSON.")] = False,
    seconds: Annotated[float, typer.Option(help="Bound for one world.")] = 150.0,
    replays: Annotated[int, typer.Option(help="Graph replays per measurement.")] = 40,
    capacity: Annotated[int, typer.Option(help="Bytes of the largest message.")] = 1 << 20,
    preload: Annotated[str, typer.Option(help="Library the ranks load first (an NCCL of 2.30 or newer).")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the results go.")] = None,
) -> None:  # fmt: skip
    """Time all-reduce and its fusion against the rivals that can run here."""
    end_on_sigterm()
    if shutil.which("nvidia-cuda-mps-control") is None:
        raise SystemExit(
            "nvidia-cuda-mps-control is not on PATH: several ranks on one GPU need MPS"
        )
    arguments = [
        "--rows", rows, "--hidden", hidden, "--contenders", contenders, "--replays", str(replays),
        "--capacity", str(capacity), "--seconds", str(seconds * 0.8),
    ] + ["--sweep"] * sweep + ["--screen"] * screen  # fmt: skip
    results: list[dict[str, Any]] = []
    for world in map(int, worlds.split(",")):
        with mps() as env:
            if preload:  # for the ranks only, not for the MPS server
                env = {**env, "LD_PRELOAD": preload, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
            results += run_world(world, arguments, env, seconds)
        if json_path is not None:  # what a later world cannot take away
            json_path.write_text(json.dumps(results, indent=1))
    for r in results:
        if r["kind"] not in ("final", "screen"):
            print(r)
    print("\n" + title(results))
    print(table(results))


if __name__ == "__main__":
    typer.run(main)
