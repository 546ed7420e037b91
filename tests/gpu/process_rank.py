"""One rank of tests/gpu/test_processes_gpu.py: a process of its own that sums with others over shared slabs."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from rig import canonical_sum, inputs, reference_norm
from sglang_sm120.comm.communicator import CollectiveError
from sglang_sm120.comm.native import NativeCommunicator
from sglang_sm120.comm.native_build import process_group_exchange


def check_sums(communicator: NativeCommunicator, rank: int, world: int) -> None:
    for step, (rows, hidden) in enumerate(
        ((1, 7168), (4, 7168), (64, 7168), (16, 6144), (2, 2880)) * 3
    ):
        parts, residual, weight = inputs(world, rows, hidden, seed=step)
        expected = canonical_sum(parts)
        assert torch.equal(communicator.all_reduce(parts[rank]), expected), (rows, hidden)
        _, residual_out = communicator.all_reduce_rmsnorm(parts[rank], residual, weight, 1e-6)
        assert torch.equal(residual_out, reference_norm(expected, residual, weight, 1e-6)[1])
    parts, _, _ = inputs(world, 8, 7168)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [communicator.all_reduce(parts[rank]) for _ in range(7)]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    communicator.check()
    assert all(torch.equal(out, canonical_sum(parts)) for out in outs)
    print(f"SUMS RIGHT over {communicator.way}", flush=True)


def die_or_report(communicator: NativeCommunicator, rank: int, world: int) -> None:
    parts, _, _ = inputs(world, 4, 7168)
    for _ in range(5):
        communicator.all_reduce(parts[rank])
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    began = time.monotonic()
    communicator.all_reduce(parts[rank])
    torch.cuda.synchronize()
    try:
        communicator.check()
    except CollectiveError as error:
        print(f"FAILED in {time.monotonic() - began:.2f} s: {error}", flush=True)


def main() -> None:
    rank, world, port, ways, scenario = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        sys.argv[4],
        sys.argv[5],
    )
    torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    exchange: Any = process_group_exchange(dist.group.WORLD)
    relay = ways.startswith("relay")  # "relay_one_shot" or "relay_two_shot", in pinned host memory
    communicator = NativeCommunicator(
        "processes", rank, world, exchange, capacity_bytes=2 << 20,
        ways=["host"] if relay else ways.split(","), relay=relay, schedule=ways if relay else "auto",
        timeout_ms=500 if scenario == "kill" else 5000, early_launch=True,
    )  # fmt: skip
    (die_or_report if scenario == "kill" else check_sums)(communicator, rank, world)
    sys.stdout.flush()
    os._exit(0)  # the process group would wait for the killed rank


if __name__ == "__main__":
    main()
