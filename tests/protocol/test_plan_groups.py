"""Groups that are not all of the ranks: the sum is over the right ones, and each group has its own plan."""

from __future__ import annotations

import os

import pytest
import torch
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.host import HostCommunicator
from sglang_sm120.comm.plan import Plan
from sglang_sm120.comm.start import Setting, planned
from sglang_sm120.fabric.islands import Partition, flat
from sglang_sm120.fabric.software import ThreadExchange, run_ranks
from sglang_sm120.fabric.versions import Versions

# Six ranks split the way SGLang splits attention TP, expert parallel x TP, and odd leftovers.
SPLITS: dict[str, Partition] = {
    "attention_tp": ((0, 1, 2), (3, 4, 5)),
    "moe_tp": ((0, 2, 4), (1, 3, 5)),
    "moe_ep": ((0, 5), (1, 4), (2, 3)),
    "tp": ((0, 1, 2, 3, 4, 5),),
}


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_c23_each_group_sums_its_own_ranks(name: str) -> None:
    groups = SPLITS[name]
    meet = {g: ThreadExchange(len(g), timeout_s=120) for g in groups}

    def body(rank: int) -> tuple[float, Plan]:
        group = next(g for g in groups if rank in g)
        me = group.index(rank)
        session = f"groups{os.getpid()}{name}{group[0]}"
        inner = HostCommunicator(name, me, len(group), session=session, timeout_ms=60_000)
        ours = planned(
            inner,
            "host",
            Setting(
                gpus=tuple(f"cpu{r}" for r in group),
                hosts=("here",) * len(group),
                versions=Versions(),
                islands=flat(len(group)),
                pin="host",
            ),
            device=torch.device("cpu"),
            exchange=meet[group].of(me),
        )
        ours.prepare(256, torch.bfloat16, (1, 2))
        assert ours.plan is not None and ours.admits(Op.ALL_REDUCE, 2, 256, torch.bfloat16)
        total = ours.all_reduce(torch.full((2, 256), 2.0**rank, dtype=torch.bfloat16))
        assert bool((total == total[0, 0]).all())
        ours.close()
        return float(total[0, 0]), ours.plan

    answers = run_ranks(6, body)
    for group in groups:
        assert {answers[r][0] for r in group} == {float(sum(2**r for r in group))}
        assert len({answers[r][1].digest() for r in group}) == 1
        assert answers[group[0]][1].group == name
