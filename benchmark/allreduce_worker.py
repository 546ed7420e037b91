"""One rank of benchmark/allreduce.py: captures graphs of 20 calls and times their replays.

Rank 0 prints a JSON line per result; every decision that changes what runs next is taken from gathered values, so
that all ranks do the same.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from allreduce_contenders import EPS, Inputs, Native, Nccl, PcieIpc, Trtllm, Way, link_gbps

CALLS = 20  # per graph


class Rank:
    """Process group, timing and agreement of one rank."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        torch.cuda.set_device(0 if torch.cuda.device_count() < world else rank)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
        self.rank, self.world = rank, world
        self.stream = torch.cuda.Stream()

    def exchange(self, value: Any) -> list[Any]:
        told: list[Any] = [None] * self.world
        dist.all_gather_object(told, value)
        return told

    def say(self, **record: Any) -> None:
        if self.rank == 0:
            print("RESULT " + json.dumps(record), flush=True)

    def leave(self, contenders: Iterable[Any], **record: Any) -> NoReturn:
        """Close the contenders and end this process.

        NCCL is none of them: its ranks of one GPU wait for each other while they tear down.
        """
        torch.cuda.synchronize()
        self.say(kind="done", **record)
        self.exchange(None)  # nobody takes memory away that another still reads
        for contender in contenders:
            contender.close()
        os._exit(0)

    def inputs(self, rows: int, hidden: int) -> Inputs:
        g = torch.Generator(device="cuda").manual_seed(rows * 131 + hidden)
        parts = [
            torch.randn(rows, hidden, generator=g, device="cuda").bfloat16()
            for _ in range(self.world)
        ]
        residual = torch.randn(rows, hidden, generator=g, device="cuda").bfloat16()
        weight = torch.rand(hidden, generator=g, device="cuda").bfloat16()
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return Inputs(parts[self.rank].clone(), residual, weight, total.bfloat16())

    def capture(self, way: Way) -> torch.cuda.CUDAGraph | None:
        """A graph of CALLS calls, checked; None on all ranks if it fails on any."""
        error = None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self.stream):
                way.call()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=self.stream):
                for _ in range(CALLS):
                    way.call()
        except Exception as problem:
            error = (
                f"{type(problem).__name__}: {str(problem).splitlines()[-1] if str(problem) else ''}"
            )
        failed = next((e for e in self.exchange(error) if e), None)
        if failed:
            self.say(kind="failed", way=way.name, error=failed[:200])
            return None
        return graph

    def time(self, graph: torch.cuda.CUDAGraph, replays: int) -> float:
        """Microseconds per call: median over replays of the maximum over ranks."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        dist.barrier()
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                graph.replay()
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
        torch.cuda.synchronize()
        mine = [a.elapsed_time(b) * 1000 / CALLS for a, b in zip(events, events[1:])]
        return median(max(times) for times in zip(*self.exchange(mine)))

    def right(self, way: Way, i: Inputs) -> bool:
        got, expected = way.result(), i.total
        if way.fused:
            y = (i.total.float() + i.residual.float()).bfloat16().float()
            expected = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * i.weight.float()
        elif "norm" in way.name or "fp8" in way.name:
            return True  # in-place chains drift from replay to replay; their sum was checked alone
        close = torch.allclose(got.float(), expected.float(), rtol=2e-2, atol=6e-2)
        return all(self.exchange(close))


def best_of(
    rank: Rank, ways: list[Way], i: Inputs, replays: int, note: str
) -> tuple[float, Way, Any] | None:
    """Time every way briefly; return the fastest right one with its graph."""
    best = None
    for way in ways:
        graph = rank.capture(way)
        if graph is None:
            way.repair(rank.exchange)
            continue
        us = rank.time(graph, replays)
        if not rank.right(way, i):
            rank.say(kind="wrong", way=way.name, rows=i.rows, hidden=i.hidden)
            way.repair(rank.exchange)
            continue
        if note:
            rank.say(
                kind="screen", way=way.name, us=round(us, 3), rows=i.rows, hidden=i.hidden, op=note
            )
        if best is None or us < best[0]:
            best = (us, way, graph)
    return best


def final(
    rank: Rank, entries: list[tuple[str, Way, Any]], i: Inputs, op: str, replays: int
) -> None:
    """A-B-...-B-A over the contenders' best ways."""
    seen: dict[str, list[float]] = {}
    for label, _, graph in entries + entries[::-1]:
        seen.setdefault(label, []).append(rank.time(graph, replays))
    for label, way, _ in entries:
        rank.say(
            kind="final", op=op, rows=i.rows, hidden=i.hidden, contender=label, way=way.name,
            us=round(sum(seen[label]) / 2, 3), spread=round(abs(seen[label][0] - seen[label][1]), 3),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--hidden", default="7168")
    parser.add_argument("--contenders", default="native,pcie_ipc,trtllm")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--screen", action="store_true")
    parser.add_argument("--replays", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--capacity", type=int, default=1 << 20)
    a = parser.parse_args()
    began = time.monotonic()
    rank = Rank(a.rank, a.world, a.port)
    makers = {
        "native": lambda: Native(a.rank, a.world, rank.exchange, host=False, sweep=a.sweep, capacity=a.capacity),
        "mailbox": lambda: Native(a.rank, a.world, rank.exchange, host=True, sweep=a.sweep, capacity=a.capacity),
        "relay_one_shot": lambda: Native(a.rank, a.world, rank.exchange, host=True, sweep=False, capacity=a.capacity, relay="relay_one_shot"),
        "relay_two_shot": lambda: Native(a.rank, a.world, rank.exchange, host=True, sweep=False, capacity=a.capacity, relay="relay_two_shot"),
        "pcie_ipc": lambda: PcieIpc(dist.group.WORLD, a.rank, a.world),
        "trtllm": lambda: Trtllm(dist.group.WORLD, a.rank, a.world),
        "nccl": lambda: Nccl(a.rank, a.world),
    }  # fmt: skip
    shared_gpu = torch.cuda.device_count() < a.world
    if any(name.startswith(("mailbox", "relay")) for name in a.contenders.split(",")):
        # Alone on the link: the other ranks wait at the barrier.
        gbps = link_gbps() if a.rank == 0 else 0.0
        dist.barrier()
        rank.say(kind="link", gbps=round(gbps, 2), sharing=a.world if shared_gpu else 1)
    contenders: dict[str, Any] = {}
    for name in a.contenders.split(","):
        error = None
        try:
            contenders[name] = makers[name]()
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        if any(rank.exchange(error)):
            contenders.pop(name, None)
            rank.say(kind="absent", contender=name, error=str(error)[:300])
    rank.say(kind="ready", seconds=round(time.monotonic() - began, 1), contenders=list(contenders))
    for hidden in map(int, a.hidden.split(",")):
        for rows in map(int, a.rows.split(",")):
            late = time.monotonic() - began > a.seconds
            if any(rank.exchange(late)):
                rank.say(kind="out of time", rows=rows, hidden=hidden)
                continue
            i = rank.inputs(rows, hidden)
            for fused in (False, True):
                op = "fused" if fused else "plain"
                entries = []
                for name, contender in contenders.items():
                    note = op if a.screen and isinstance(contender, Native) else ""
                    best = best_of(rank, list(contender.ways(i, fused)), i, 10, note)
                    if best is None:
                        continue
                    if name == "pcie_ipc" and not fused:
                        contender.keep_best(best[1].name, rows, hidden)
                    # Ranks of one GPU reach each other through its memory whatever NCCL_P2P_DISABLE says.
                    label = f"{name} (in GPU memory)" if name == "nccl" and shared_gpu else name
                    entries.append((label, best[1], best[2]))
                    if fused and isinstance(contender, Native) and name == "native":
                        fp8 = best_of(rank, list(contender.ways(i, True, fp8=True))[:1], i, 10, "")
                        if fp8:
                            entries.append(("native+fp8", fp8[1], fp8[2]))
                final(rank, entries, i, op, a.replays)
    contenders.pop("nccl", None)
    rank.leave(contenders.values(), seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    main()
