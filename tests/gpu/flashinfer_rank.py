"""One rank of tests/gpu/test_flashinfer_gpu.py: FlashInfer's kernels through our backend, in every way it offers."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from rig import inputs, reference_norm
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.flashinfer import FlashInferCommunicator, Modules
from sglang_sm120.comm.native_build import process_group_exchange

HIDDEN, ROWS = 7168, (1, 4, 16, 64)


def near(got: torch.Tensor, exact: torch.Tensor, rtol: float) -> bool:
    return torch.allclose(
        got.float(), exact.float(), rtol=rtol, atol=rtol * float(exact.abs().max())
    )


def check(
    ours: FlashInferCommunicator, rank: int, exchange: Any, schedule: str, ctas: int, rows: int
) -> None:
    parts, residual, weight = inputs(ours.world, rows, HIDDEN, seed=rows)
    total = torch.stack(parts).float().sum(0)
    for op in (Op.ALL_REDUCE, Op.ALL_REDUCE_RMSNORM):
        ours.choose(op, rows, HIDDEN, schedule, ctas)
        if not ours.admits(op, rows, HIDDEN, torch.bfloat16):
            return
    x = parts[rank].clone()
    out = torch.full_like(x, float("nan"))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        eager = ours.all_reduce(x)
        with torch.cuda.graph(graph, stream=side):
            for _ in range(3):
                out.copy_(ours.all_reduce(x))
            normed, summed = ours.all_reduce_rmsnorm(x, residual, weight, 1e-6)
        for _ in range(3):
            graph.replay()
    torch.cuda.synchronize()
    where = f"{schedule} {ctas} {rows} rows rank {rank}"
    assert near(eager, total, 2e-2) and torch.equal(eager, out), where
    exact, kept = reference_norm(out, residual, weight, 1e-6)
    # FlashInfer rounds the sum and the residual once where we round twice.
    assert near(summed, kept, 2e-2) and near(normed, exact, 3e-2), where
    same = exchange((out.cpu().view(torch.int16).tolist(), summed.cpu().view(torch.int16).tolist()))
    alike = all(told == same[0] for told in same)
    if rank == 0:
        print(
            f"{where}: right, {'bit-identical on all ranks' if alike else 'RANKS DIFFER'}",
            flush=True,
        )
    # Ours may only be alike; what FlashInfer has besides is shown.
    assert alike or (schedule, ctas) not in ours.ways(Op.ALL_REDUCE), where


def main() -> None:
    rank, world, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    exchange: Any = process_group_exchange(dist.group.WORLD)
    modules = Modules.found()
    if rank == 0:
        print(f"compiled: {modules}", flush=True)
    ours = FlashInferCommunicator(
        "flashinfer", rank, world, dist.group.WORLD, exchange, modules=modules, shared_gpu=True
    )
    ours.prepare(HIDDEN, torch.bfloat16, ROWS)
    staged = [("pcie_staged", 8)] if world > 2 else []
    for schedule, ctas in dict.fromkeys([*ours.ways(Op.ALL_REDUCE), *staged]):
        for rows in ROWS:
            check(ours, rank, exchange, schedule, ctas, rows)
    print(f"FLASHINFER RIGHT, left out: {ours.left_out}", flush=True)
    os._exit(0)  # giving FlashInfer's memory back is collective; the process's end does it


if __name__ == "__main__":
    main()
