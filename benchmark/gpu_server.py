"""A real SGLang server with several ranks on one GPU: plain, EAGLE-3, EAGLE-3 with the plugin; same prompts, one table.

Needs MPS running and an NCCL that takes several ranks of one GPU (2.30 or newer, NCCL_MULTI_RANK_GPU_ENABLE=1); every
rank must see the same device 0. The figures hold for this rig only: peers are reached through the GPU's L2, not PCIe.

Run: python benchmark/gpu_server.py --model DIR --drafter DIR --ranks 2 --json benchmark/results/gpu-server.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sglang_sm120.sim.server import ServerError, SimServer, eagle3_flags

FLAGS = [
    "--device", "cuda", "--mem-fraction-static", "0.08", "--attention-backend", "triton",
    "--sampling-backend", "pytorch", "--cuda-graph-max-bs-decode", "4", "--max-running-requests", "4",
    "--disable-prefill-cuda-graph", "--enforce-disable-flashinfer-allreduce-fusion",
]  # fmt: skip
PROMPTS = ("The ", "When ", "In the ", "It was ", "There ", "And so ", "A ", "She ")


def serve(name: str, args: argparse.Namespace, flags: list[str], logs: Path) -> dict[str, Any]:
    """Start one server, send the prompts one by one, three times, and stop it."""
    logs.mkdir(parents=True, exist_ok=True)
    stats = logs / f"{name}.stats"
    server = SimServer(
        args.model,
        [*FLAGS, *flags, "--sm120-stats", str(stats)],
        tp=args.ranks,
        env={"SGLANG_PLATFORM": None},
        log=logs / f"{name}-{args.ranks}.log",
        start_timeout_s=args.start_timeout,
    )
    with server:
        server.generate(
            PROMPTS, max_new_tokens=args.tokens
        )  # compiles what is compiled at first use
        rates, ids = [], []
        for _ in range(3):
            began = time.monotonic()
            answers = server.generate(PROMPTS, max_new_tokens=args.tokens)
            rates.append(len(PROMPTS) * args.tokens / (time.monotonic() - began))
            ids = [answer.output_ids for answer in answers]
        time.sleep(3)
        reports = [Path(f"{stats}.rank{rank}") for rank in range(args.ranks)]
        counters = [json.loads(path.read_text()) for path in reports if path.exists()]
        said = [line for line in server.log_text().splitlines() if "sm120" in line.lower()]
        return {
            "name": name,
            "start_s": server.startup_s,
            "tokens_per_s": statistics.median(rates),
            "accept_length": server.accept_length(),
            "ids": ids,
            "counters": counters,
            "log": said[:60],
        }


def rig(ranks: int) -> str:
    """What the figures were measured on."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return f"{ranks} ranks on one {gpu} under MPS, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--drafter", required=True, type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--only", default="plain,eagle3,plugin", help="which servers, by name")
    parser.add_argument("--start-timeout", type=float, default=180.0, help="seconds per server")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/gpu-server"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # The launcher starts on the CPU platform unless another one is named.
    os.environ.setdefault("SGLANG_PLATFORM", "cuda")
    speculate = eagle3_flags(args.drafter.resolve())
    settings = {
        "plain": [],
        "eagle3": speculate,
        "plugin": [*speculate, "--enable-sm120-fusion"],
        "plugin-native": [*speculate, "--enable-sm120-fusion", "--sm120-backend", "native"],
    }
    console = Console(width=140)
    results: list[dict[str, Any]] = []
    for name in args.only.split(","):
        console.print(f"starting {name} ...")
        try:
            results.append(serve(name, args, settings[name], args.logs))
        except ServerError as error:
            console.print(f"{name}: {error}", markup=False)
    table = Table(title=f"Tiny model, EAGLE-3, graphs on: {rig(args.ranks)}")
    for column in ("server", "ready s", "tokens/s", "ratio", "accept length", "same tokens"):
        table.add_column(column)
    for r in results:
        first = results[0]
        table.add_row(
            r["name"],
            f"{r['start_s']:.0f}",
            f"{r['tokens_per_s']:.0f}",
            f"{r['tokens_per_s'] / first['tokens_per_s']:.2f}x",
            "-" if r["accept_length"] is None else f"{r['accept_length']:.2f}",
            "yes" if r["ids"] == first["ids"] else "NO",
        )
    console.print(table)
    for r in results:
        for report in r["counters"][:1]:
            console.print(r["name"], json.dumps(report)[:1500], markup=False)
    if args.json:
        args.json.write_text(json.dumps({"rig": rig(args.ranks), "results": results}, indent=1))
    if len(results) < len(args.only.split(",")) or any(
        r["ids"] != results[0]["ids"] for r in results
    ):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
