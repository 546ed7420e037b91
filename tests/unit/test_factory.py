"""The factory: every rank of a group gets a communicator, or every rank declines with the same reason."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sglang_sm120.comm import factory
from sglang_sm120.comm.communicator import Communicator, Op
from sglang_sm120.comm.factory import Declined, GroupSpec, Outcome
from sglang_sm120.options import Options

WORLD = 3
TRIAL = {"host": "test_factory:build_trial", "native": "test_factory:build_on_gpu"}


class Trial(Communicator):
    """Adds up nothing; remembers what it was built with."""

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec.name, spec.rank, spec.world)
        self.spec = spec
        self.closed = False

    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        return True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_reduce_rmsnorm(self, x, residual, weight, eps, *, gemma=False):
        return x, residual

    def close(self) -> None:
        self.closed = True


built: list[Trial] = []


def build_trial(spec: GroupSpec) -> Communicator:
    if spec.name.startswith("refused") and spec.rank == 2:
        raise Declined("peer access failed with error 101")
    if spec.name.startswith("broken") and spec.rank == 1:
        raise OSError("no space left")
    built.append(Trial(spec))
    return built[-1]


def build_alone(spec: GroupSpec) -> Communicator:
    if spec.rank == 1:
        raise OSError("no memory on this GPU")
    _all("between two steps of a builder")
    return Trial(spec)


def build_on_gpu(spec: GroupSpec) -> Communicator:
    raise Declined("no GPU here")


def _build(name: str, options: Options, **kwargs: Any) -> Outcome:
    return factory.build(
        name, dist.group.WORLD, torch.device("cpu"), options, backends=TRIAL, **kwargs
    )


def _all(told: Any) -> list[Any]:
    out: list[Any] = [None] * WORLD
    dist.all_gather_object(out, told)
    return out


def _scenarios(rank: int) -> dict[str, Any]:
    """What one rank saw, scenario by scenario; every rank runs the same ones in the same order."""
    seen: dict[str, Any] = {}
    agreed = _build("tp", Options(enabled=True))
    spec = agreed.communicator.served["host"].spec
    seen["agreed"] = (
        agreed.reason,
        spec.session,
        spec.rank,
        spec.world,
        [p.rank for p in spec.peers],
    )
    seen["pids"] = [p.pid for p in agreed.peers]
    seen["second_session"] = _build("tp", Options(enabled=True)).session
    for name in ("refused", "broken"):
        count = len(built)
        outcome = _build(name, Options(enabled=True))
        seen[name] = (outcome.communicator, outcome.reason)
        seen[f"{name} closed"] = [trial.closed for trial in built[count:]]
    seen["islands"] = _build("tp", Options(enabled=True, islands="0,1;2,3")).reason
    seen["islands elsewhere"] = _build("moe_tp", Options(enabled=True, islands="0,1;2,3")).reason
    seen["options"] = _build("tp", Options(enabled=True, timeout_ms=1000 + rank)).reason
    seen["nccl"] = _build("tp", Options(enabled=True, backend="nccl")).reason
    seen["native"] = _build("tp", Options(enabled=True, backend="native")).reason
    TRIAL["host"] = "test_factory:build_alone"
    try:
        seen["apart"] = _build("tp", Options(enabled=True)).reason
    except factory.RanksApart as apart:
        seen["apart"] = str(apart)
    if rank == 1:
        _all("what SGLang does next")
    TRIAL["host"] = "test_factory:build_trial"
    count = len(built)
    factory.EXTRAS["host"] = {"one": "test_factory:build_trial", "two": "test_factory:build_trial"}
    for name in ("welcome", "refused too"):
        asked = GroupSpec(name, rank, WORLD, "s", spec.device, spec.process_group, spec.options, ())
        makers = factory._extras(asked, "host", lambda told: _all(told))
        seen[f"extra {name}"] = makers["one"]() is not None
    seen["extra closed"] = [(trial.name, trial.closed) for trial in built[count:]]
    if rank == 2:
        factory._machine = lambda: "another machine"
    seen["machines"] = _build("tp", Options(enabled=True)).reason
    return seen


def _rank(rank: int, store: str, results: Any) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
        results.put((rank, _scenarios(rank)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [context.Process(target=_rank, args=(r, store, results)) for r in range(WORLD)]
        for process in ranks:
            process.start()
        told = dict(results.get(timeout=120) for _ in ranks)
        for process in ranks:
            process.join(30)
    for rank, report in told.items():
        assert isinstance(report, dict), f"rank {rank}: {report}"
    return [told[rank] for rank in range(WORLD)]


def test_all_ranks_share_one_session_and_know_each_other(seen):
    sessions = {report["agreed"][1] for report in seen}
    assert len(sessions) == 1 and sessions.pop().startswith("tp-host-")
    for rank, report in enumerate(seen):
        reason, _, own, world, peers = report["agreed"]
        assert (own, world, peers) == (rank, WORLD, [0, 1, 2])
        assert reason.startswith('backend "host" is ready for group "tp"')
    assert (
        len({tuple(report["pids"]) for report in seen}) == 1 and len(set(seen[0]["pids"])) == WORLD
    )


def test_two_groups_of_the_same_ranks_get_different_sessions(seen):
    assert all(report["second_session"] != report["agreed"][1] for report in seen)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("refused", "rank 2: peer access failed with error 101"),
        ("broken", "rank 1: OSError: no space left"),
    ],
)
def test_one_rank_that_cannot_makes_all_decline_with_its_reason(seen, name, reason):
    for report in seen:
        communicator, said = report[name]
        assert communicator is None
        assert said == f'backend "host" is off for group "{name}" ({reason})'
        assert all(report[f"{name} closed"])
    assert sum(len(report[f"{name} closed"]) for report in seen) == WORLD - 1


def test_a_rank_that_fails_alone_inside_a_builder_is_noticed_by_all_instead_of_hanging(seen):
    assert "not at the same step as ranks [0, 2]" in seen[1]["apart"]
    assert "OSError: no memory on this GPU" in seen[1]["apart"]
    for rank in (0, 2):
        assert f'rank {rank} of group "tp" is not at the same step as ranks [1]' in seen[rank]["apart"]  # fmt: skip


def test_a_further_backend_joins_on_all_ranks_or_on_none(seen):
    for rank, report in enumerate(seen):
        assert report["extra welcome"] and not report["extra refused too"]
        refused = [] if rank == 2 else [("refused too", True)]
        assert report["extra closed"] == [("welcome", False), *refused]


def test_islands_that_do_not_fit_the_tp_group_are_named_and_other_groups_do_not_use_them(seen):
    for report in seen:
        assert "names ranks 0 to 3" in report["islands"] and "ranks 0 to 2" in report["islands"]
        assert report["islands elsewhere"].startswith('backend "host" is ready for group "moe_tp"')


@pytest.mark.parametrize(
    "scenario, text",
    [
        ("options", "different sm120 options (timeout_ms: rank 0 has 1000, rank 1 has 1001)"),
        ("nccl", "leaves every sum to SGLang"),
        ("native", "rank 0: no GPU here; rank 1: no GPU here; rank 2: no GPU here"),
        ("machines", "spans several machines"),
    ],
)
def test_other_reasons_to_decline_are_the_same_on_all_ranks(seen, scenario, text):
    assert len({report[scenario] for report in seen}) == 1
    assert text in seen[0][scenario]


@pytest.mark.parametrize(
    "backend, device, chosen",
    [
        ("auto", "cpu", ("host",)),
        ("auto", "cuda", ("native", "mailbox")),
        ("mailbox", "cuda", ("mailbox",)),
    ],
)
def test_auto_follows_the_device_and_a_named_backend_is_kept(backend, device, chosen):
    assert factory.choose_backends(Options(backend=backend), device) == chosen


def test_host_backend_declines_a_gpu():
    spec = GroupSpec("tp", 0, 2, "s", torch.device("cuda", 0), None, Options(), ())  # type: ignore[arg-type]
    with pytest.raises(Declined, match="sums CPU tensors, and this rank computes on cuda:0"):
        factory.build_host(spec)
