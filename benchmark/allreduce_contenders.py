"""Who takes part in benchmark/allreduce.py: our kernels and the rivals, each as a maker of calls.

A contender, given the inputs of one shape, returns the ways it can serve it: a name and a function that issues one
call on the current stream. Every way is checked against the scalar sum before it is timed.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Exchange = Callable[[Any], list[Any]]
HIDDEN_MAX, ROWS_MAX = 7168, 64
EPS = 1e-6


@dataclass
class Inputs:
    """One shape on one rank: this rank's part, and what all ranks share."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    total: torch.Tensor  # the canonical sum, for checking

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def hidden(self) -> int:
        return self.x.shape[1]


@dataclass
class Way:
    """One way to serve a shape; `call` issues it and `result` is where the (first) output lies."""

    name: str
    call: Callable[[], None]
    result: Callable[[], torch.Tensor]
    fused: bool
    repair: Callable[[Exchange], None] = lambda exchange: None  # after a failure, on all ranks


class Native:
    """Our kernels over peer slabs (`ways=("vmm", "ipc")`) or pinned host memory (`ways=("host",)`).

    `relay`: one of the forms with flags, over pinned host memory; empty for the forms that travel in tiles.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        exchange: Exchange,
        *,
        host: bool,
        sweep: bool,
        capacity: int,
        relay: str = "",
    ) -> None:
        from sglang_sm120.comm import slab
        from sglang_sm120.comm.native import NativeCommunicator

        self.name = relay or ("mailbox" if host else "native")
        self.host, self.sweep, self.world = host, sweep and not relay, world
        self.comm = NativeCommunicator(
            "bench", rank, world, exchange, capacity_bytes=capacity, timeout_ms=2000, early_launch=True,
            ways=slab.HOST_WAYS if host else slab.PEER_WAYS, relay=bool(relay), schedule=relay or "auto",
        )  # fmt: skip
        self.out: torch.Tensor | None = None

    def ways(self, i: Inputs, fused: bool, fp8: bool = False) -> Iterator[Way]:
        from sglang_sm120.comm.communicator import Op
        from sglang_sm120.comm.native_how import How

        op = Op.ALL_REDUCE_RMSNORM if fused else Op.ALL_REDUCE
        hows: list[tuple[str, How | None]] = [("default", None)]
        if self.sweep:
            hows += [(self._label(h), h) for h in self._spreads(i.rows, i.hidden, fused)]
        for label, how in hows:

            def call(how: How | None = how) -> None:
                self.comm.pin(Op.ALL_REDUCE_RMSNORM_FP8 if fp8 else op, i.rows, how)
                if fp8:
                    self.out = self.comm.all_reduce_rmsnorm_fp8(i.x, i.residual, i.weight, EPS)[2]
                elif fused:
                    self.out, self.res = self.comm.all_reduce_rmsnorm(
                        i.x, i.residual, i.weight, EPS
                    )
                else:
                    self.out = self.comm.all_reduce(i.x)

            def result() -> torch.Tensor:
                assert self.out is not None
                return self.out

            def repair(exchange: Exchange) -> None:
                if self.comm.failed:
                    print(self.comm.describe_failure(), file=sys.stderr)
                if any(exchange(self.comm.failed)):
                    self.comm.recover(exchange)

            name = f"{self.name}{'+fp8' if fp8 else ''} {label}"
            yield Way(name, call, result, fused and not fp8, repair)

    @staticmethod
    def _label(h: Any) -> str:
        return (
            f"{h.schedule.replace('_shot', '')} c{h.cluster} w{h.group_warps} r{h.rows_per_cta} n{h.ctas}"
            f"{'' if h.early_launch else ' nopdl'}"
        )

    def _spreads(self, rows: int, hidden: int, fused: bool) -> Iterator[Any]:
        """Spreads worth timing: clusters 1 to 8, and one or two numbers of warps for each."""
        from sglang_sm120.comm.native_how import How

        tiles = (hidden + 255) // 256
        schedules = ["one_shot"] if self.world == 2 else ["one_shot", "two_shot"]
        if self.host:
            schedules = ["one_shot", "two_shot"]
        for schedule in schedules:
            if rows * hidden * 2 > self.comm._small and schedule == "one_shot":
                continue
            for cluster in (1, 2, 4, 8):
                for per_cta in (1, 2, 4):
                    ctas = -(-rows // per_cta) * cluster
                    if ctas > 16 or (per_cta > 1 and cluster > 1) or per_cta > rows:
                        continue
                    for units in (1, 2, 4):
                        warps = math.ceil(math.ceil(tiles / cluster) / units)
                        if warps * per_cta > 32 or (cluster > 1 and fused and units > 1):
                            continue
                        yield How(schedule, cluster, warps, per_cta, ctas)
                        yield How(schedule, cluster, warps, per_cta, ctas, False)

    def close(self) -> None:
        self.comm.close()


class _Mapped:
    """Pinned host memory as a kernel sees it, as `torch.as_tensor` takes it."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape), "typestr": "<f4", "data": (pinned.data_ptr(), False), "version": 3,
        }  # fmt: skip


def link_gbps(nbytes: int = 64 << 20, repeats: int = 8) -> float:
    """GB/s each way between this GPU and pinned host memory, while one kernel writes there and another reads."""
    count = nbytes // 4
    held = [torch.zeros(count, pin_memory=True) for _ in range(2)]
    there = [torch.as_tensor(_Mapped(h), device="cuda") for h in held]
    here = [torch.zeros(count, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    times = []
    for warm in (True, False):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for _ in range(1 if warm else repeats):
            with torch.cuda.stream(streams[0]):
                torch.mul(here[0], 1.0, out=there[0])
            with torch.cuda.stream(streams[1]):
                torch.mul(there[1], 1.0, out=here[1])
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return nbytes * repeats / times[1] / 1e6


class PcieIpc:
    """FlashInfer `pcie_ipc`, every variant its policy admits at this world; fused = it, then FlashInfer's norm."""

    name = "flashinfer pcie_ipc"
    schedules = {
        2: ("pcie_unstaged", "pcie_staged"),
        4: ("pcie_unstaged", "pcie_staged"),
        8: ("pcie_unstaged", "pcie_staged", "pcie_flat_staged"),
    }

    def __init__(self, group: Any, rank: int, world: int) -> None:
        os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")
        from sglang_sm120.comm.flashinfer_kernels import PcieSum

        self.world = world
        self.kernel = PcieSum(group, world, ROWS_MAX * HIDDEN_MAX)
        self.best: dict[tuple[int, int], tuple[str, int, int]] = {}

    def configs(self) -> Iterator[tuple[str, int, int]]:
        most = 16 if self.world == 8 else 32
        for schedule in self.schedules[self.world]:
            for blocks in (1, 2, 4, 8, 16, 32):
                for threads in (128, 256, 512):
                    if blocks <= most and not (self.world == 8 and blocks % 4):
                        yield schedule, blocks, threads

    def ways(self, i: Inputs, fused: bool) -> Iterator[Way]:
        key = (i.rows, i.hidden)
        configs = [self.best[key]] if key in self.best else list(self.configs())
        if fused and key not in self.best:
            return
        out = torch.empty_like(i.x)
        residual = i.residual.clone()
        for config in configs:

            def call(config: tuple[str, int, int] = config) -> None:
                self.kernel.sum(i.x, out, *config)
                if fused:
                    _norm(out, residual, i.weight)

            schedule, blocks, threads = config
            name = f"{self.name} {schedule} b{blocks} t{threads}"
            yield Way(name + (" + norm" if fused else ""), call, lambda: out, False)

    def keep_best(self, name: str, rows: int, hidden: int) -> None:
        """Remember the configuration in a way's name: the fused form uses it."""
        schedule, blocks, threads = name.removeprefix(f"{self.name} ").split()
        self.best[rows, hidden] = (schedule, int(blocks[1:]), int(threads[1:]))

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.kernel.destroy()


def _norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    from flashinfer.norm import get_norm_module

    get_norm_module().fused_add_rmsnorm(x, residual, weight, EPS, True)


class Trtllm:
    """FlashInfer's TensorRT-LLM all-reduce fusion, one-shot and two-shot, with and without early launch."""

    name = "flashinfer trtllm"

    def __init__(self, group: Any, rank: int, world: int) -> None:
        from sglang_sm120.comm.flashinfer_kernels import TrtllmFusion

        self.world = world
        shared = torch.cuda.device_count() < world
        self.kernel = TrtllmFusion(group, rank, world, ROWS_MAX, HIDDEN_MAX, shared)

    def ways(self, i: Inputs, fused: bool) -> Iterator[Way]:
        out, norm, res = torch.empty_like(i.x), torch.empty_like(i.x), torch.empty_like(i.x)
        if not self.kernel.admits(i.rows, i.x.numel()):
            return
        for one_shot in (True, False):
            for pdl in (True, False):
                if not one_shot and i.rows <= self.world:
                    continue

                def call(one_shot: bool = one_shot, pdl: bool = pdl) -> None:
                    self.kernel.one_shot, self.kernel.pdl = one_shot, pdl
                    if fused:
                        self.kernel.sum_add_norm(i.x, i.residual, i.weight, EPS, False, norm, res)
                    else:
                        self.kernel.sum(i.x, out)

                name = f"{self.name} {'one' if one_shot else 'two'}-shot{' pdl' if pdl else ''}"
                yield Way(name, call, lambda: norm if fused else out, fused)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.kernel.destroy()


class Nccl:
    """NCCL through torch (NCCL 2.30 and newer take several ranks on one GPU); fused = it, then FlashInfer's norm."""

    name = "nccl"

    def __init__(self, rank: int, world: int) -> None:
        self.group = dist.new_group(backend="nccl")
        warm = torch.ones(8, device="cuda")
        dist.all_reduce(warm, group=self.group)
        torch.cuda.synchronize()

    def ways(self, i: Inputs, fused: bool) -> Iterator[Way]:
        out, residual = i.x.clone(), i.residual.clone()

        def call() -> None:
            out.copy_(i.x)  # NCCL sums in place; the copy is timed apart and is within its noise
            dist.all_reduce(out, group=self.group)
            if fused:
                _norm(out, residual, i.weight)

        yield Way(self.name + (" + norm" if fused else ""), call, lambda: out, False)
