"""One rank, in a process of its own, of a group that plans the host engine against gloo; see test_plan_processes."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from prometheus_client import REGISTRY
from sglang_sm120.comm.candidates import Baseline
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.counters import CallCounters
from sglang_sm120.comm.host import HostCommunicator
from sglang_sm120.comm.start import Setting, planned
from sglang_sm120.fabric.host_driver import HostDriver
from sglang_sm120.fabric.islands import flat
from sglang_sm120.fabric.versions import Versions

HIDDEN = 512


def main() -> None:
    rank, world, session, cache, pin = sys.argv[1:6]
    me, size = int(rank), int(world)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=me, world_size=size, init_method=f"file://{cache}/{session}"
    )

    def exchange(mine: object) -> list[object]:
        told: list[object] = [None] * size
        dist.all_gather_object(told, mine)
        return told

    inner = HostCommunicator("tp", me, size, session=session)
    ours = planned(
        inner,
        "host",
        Setting(
            gpus=tuple(f"cpu{r}" for r in range(size)),
            hosts=("here",) * size,
            versions=Versions(plugin="0.1.0"),
            pin=pin,
            islands=flat(size),
            cache=Path(cache) / "plans",
            environ=dict(os.environ),
        ),
        device=torch.device("cpu"),
        exchange=exchange,
        baseline=Baseline(dist.all_reduce),
        driver=lambda: HostDriver.join(me, size, session, exchange, capacity=256 << 10),
        counters=CallCounters(),
    )
    ours.prepare(HIDDEN, torch.bfloat16, (1, 2, 4, 8))
    assert ours.plan is not None
    sums = []
    for rows in (1, 5, 8):
        if ours.admits(Op.ALL_REDUCE, rows, HIDDEN, torch.bfloat16):
            got = ours.all_reduce(torch.full((rows, HIDDEN), 2.0**me, dtype=torch.bfloat16))
            sums.append(float(got.min()))
    served = sum(
        s.value
        for metric in REGISTRY.collect()
        for s in metric.samples
        if s.name == "sglang_sm120_collective_calls_total" and s.labels["backend"] == "host"
    )
    print(
        json.dumps(
            {
                "digest": ours.plan.digest(),
                "entries": [
                    [e.op.value, e.rows, e.choice.backend, e.choice.us] for e in ours.plan.entries
                ],
                "sums": sums,
                "served": served,
                "prefill": ours.admits(Op.ALL_REDUCE, 8192, HIDDEN, torch.bfloat16),
            }
        )
    )
    ours.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
