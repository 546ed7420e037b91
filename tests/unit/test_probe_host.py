"""The probe between real processes over shared memory, the check of real kernels' sums, and start-up as a whole."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from pathlib import Path

import probe_ranks
import pytest
import torch
from sglang_sm120.comm import plan_cache
from sglang_sm120.comm.communicator import CollectiveError, Communicator, Op
from sglang_sm120.comm.counters import CallCounters
from sglang_sm120.comm.dispatch import PlannedCommunicator
from sglang_sm120.comm.plan import Choice, Entry, Plan, captured_rows
from sglang_sm120.comm.planner import Candidate, Request
from sglang_sm120.comm.warmup import Planned, log_once, plan_group
from sglang_sm120.fabric import machine, probe
from sglang_sm120.fabric.driver import NoAccess
from sglang_sm120.fabric.host_driver import SHM, HostDriver
from sglang_sm120.fabric.integrity import check_sums, contribution
from sglang_sm120.fabric.islands import flat
from sglang_sm120.fabric.report import ProbeReport, vetoes
from sglang_sm120.fabric.software import SoftwareFabric, ThreadExchange, run_ranks
from sglang_sm120.fabric.verdict import Veto, user_vetoes
from sglang_sm120.fabric.versions import Versions

FIXTURES = Path(__file__).parents[1] / "fixtures" / "machines"


def test_threads_over_shared_memory_are_sound() -> None:
    meet = ThreadExchange(3)
    session = f"threads-{os.getpid()}"

    def body(rank: int) -> ProbeReport:
        driver = HostDriver.join(rank, 3, session, meet.of(rank), capacity=128 << 10)
        return probe.run(driver, meet.of(rank), probe_ranks.SLOW)

    reports = run_ranks(3, body)
    assert all(r == reports[0] for r in reports)
    assert reports[0].sound and not reports[0].simulated and not reports[0].staged
    assert all(
        gbps > 0
        for a, row in enumerate(reports[0].store_gbps)
        for b, gbps in enumerate(row)
        if a != b
    )
    assert not list(SHM.glob(f"*{session}*"))


def test_processes_over_shared_memory_are_sound() -> None:
    context = multiprocessing.get_context("spawn")
    session, out = f"processes-{os.getpid()}", context.Queue()
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [
        context.Process(target=probe_ranks.body, args=(r, 2, session, pipes, out)) for r in range(2)
    ]
    for p in ranks:
        p.start()
    reports = dict(out.get(timeout=60) for _ in ranks)
    for p in ranks:
        p.join(20)
        assert p.exitcode == 0
    assert reports[0] == reports[1] and reports[0].sound
    assert reports[0].latency_us[0][1] > 0


def test_c35_ranks_that_share_no_memory_decline_together_without_a_crash(monkeypatch) -> None:
    meet = ThreadExchange(2)
    session = f"apart-{os.getpid()}"
    real = os.open

    def elsewhere(path, flags, *mode):  # type: ignore[no-untyped-def]
        if "apart" in str(path) and not flags & os.O_CREAT:
            raise FileNotFoundError(2, "No such file or directory (another IPC namespace)")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", elsewhere)

    def body(rank: int) -> str:
        with pytest.raises(NoAccess, match="share no memory") as error:
            HostDriver.join(rank, 2, session, meet.of(rank))
        return str(error.value)

    texts = run_ranks(2, body)
    assert texts[0] == texts[1] and "rank 1" in texts[0]
    assert not list(SHM.glob(f"*{session}*"))


class ThreadSum(Communicator):
    """A communicator over a ThreadExchange, with a fault: what it returns for (call, correct sum)."""

    def __init__(self, rank: int, meet: ThreadExchange, world: int, fault=None) -> None:  # type: ignore[no-untyped-def]
        super().__init__("tp", rank, world)
        self._exchange = meet.of(rank)
        self._fault = fault
        self.closed = False
        self.told: list[tuple[Op, int, int, str, int]] = []

    def choose(self, op: Op, rows: int, hidden: int, schedule: str, ctas: int = 0) -> None:
        self.told.append((op, rows, hidden, schedule, ctas))

    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        return op in (Op.ALL_REDUCE, Op.ALL_REDUCE_RMSNORM)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.stack(self._exchange(x)).float().sum(0).to(x.dtype)
        self.calls[Op.ALL_REDUCE] += 1
        return self._fault(self.calls[Op.ALL_REDUCE], total) if self._fault else total

    def all_reduce_rmsnorm(self, x, residual, weight, eps, *, gemma=False):  # type: ignore[no-untyped-def]
        out = self.all_reduce(x) + residual
        return torch.nn.functional.rms_norm(out, x.shape[-1:], weight, eps), out

    def close(self) -> None:
        self.closed = True


def late_payload(call: int, total: torch.Tensor) -> torch.Tensor:
    """The flag came first: the last row still holds what the buffer held before."""
    if call == 3:
        total[-1] = 0
    return total


def unwritten(call: int, total: torch.Tensor) -> torch.Tensor:
    """An empty kernel: the output keeps its NaN fill."""
    return torch.full_like(total, float("nan"))


def failing(call: int, total: torch.Tensor) -> torch.Tensor:
    raise CollectiveError("rank 0 did not arrive")


def wrong_in_fp16(call: int, total: torch.Tensor) -> torch.Tensor:
    """The kernel of one dtype is broken."""
    return total + 1 if total.dtype == torch.float16 else total


def sums(  # type: ignore[no-untyped-def]
    fault, faulty: int = 1, world: int = 3, dtype: torch.dtype = torch.bfloat16
) -> list[list[Veto]]:
    meet = ThreadExchange(world)

    def body(rank: int) -> list[Veto]:
        mine = ThreadSum(rank, meet, world, fault if rank == faulty else None)
        return check_sums(mine, "native", 256, rank, meet.of(rank), rounds=4, dtype=dtype)

    return run_ranks(world, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sound_sums_raise_no_veto(dtype: torch.dtype) -> None:
    assert sums(None, dtype=dtype) == [[], [], []]


def test_the_dtype_that_is_served_is_the_one_that_is_checked() -> None:
    assert sums(wrong_in_fp16) == [[], [], []]
    (veto,) = sums(wrong_in_fp16, dtype=torch.float16)[0]
    assert veto.ranks == (1,) and "sums wrong" in veto.reason


@pytest.mark.parametrize("fault", [late_payload, unwritten])
def test_c03_c18_wrong_sums_of_the_real_kernel_veto_it_on_all_ranks(fault) -> None:  # type: ignore[no-untyped-def]
    found = sums(fault)
    assert found[0] == found[1] == found[2]
    (veto,) = found[0]
    assert veto.target == "native" and veto.ranks == (1,) and "sums wrong" in veto.reason


def test_contributions_are_exact_in_bf16_for_sixteen_ranks() -> None:
    total = sum(contribution(r, 0, 4, 64) for r in range(16))
    assert torch.equal(total.to(torch.bfloat16).float(), total)
    assert not torch.equal(contribution(0, 0, 4, 64), contribution(1, 0, 4, 64))
    assert not torch.equal(contribution(0, 0, 4, 64), contribution(0, 1, 4, 64))


def identity(rows: tuple[int, ...], plugin: str = "0.1.0") -> plan_cache.Identity:
    return plan_cache.Identity(
        gpus=("GPU-a", "GPU-b", "GPU-c", "GPU-d"),
        versions=Versions(plugin=plugin),
        group="tp",
        world=4,
        hidden=512,
        itemsize=2,
        rows=rows,
    )


ASKED = Request(
    group="tp",
    world=4,
    hidden=512,
    itemsize=2,
    rows=captured_rows([1, 8], (1, 4)),
    ops=(Op.ALL_REDUCE,),
)


def start(  # type: ignore[no-untyped-def]
    name: str,
    cache: Path | None,
    *,
    arrival_s: float = 10.0,
    plugin: str = "0.1.0",
    environ=None,
    fault=None,
    force=False,
) -> list[Planned]:
    """Start four ranks of a fixture over the software fabric."""
    fabric = SoftwareFabric(machine.load(FIXTURES / name / "fabric.toml"))
    meet = ThreadExchange(4)

    def body(rank: int) -> Planned:
        kernel = ThreadSum(rank, meet, 4, fault if rank == 2 else None)
        return plan_group(
            ASKED,
            rank=rank,
            exchange=meet.of(rank),
            identity=identity(ASKED.rows, plugin),
            cache=cache,
            driver=lambda: fabric.driver(rank),
            candidates=lambda islands, verdict: [
                Candidate("native", "two_shot", 8, lambda op, rows: 6.0 + 0.5 * rows),
                Candidate("nccl", time=lambda op, rows: 20.0 + 0.4 * rows),
            ],
            known=user_vetoes(environ or {}),
            force=force,
            effort=probe.Effort(
                integrity_bytes=(4 << 10,), stream_bytes=64 << 10, step_s=10, arrival_s=arrival_s
            ),
            sums=lambda backend: kernel,
        )

    planned = run_ranks(4, body)
    assert all(p.plan == planned[0].plan and p.vetoes == planned[0].vetoes for p in planned)
    return planned


def test_c33_the_second_start_reuses_the_plan_in_less_than_a_second(tmp_path) -> None:
    first = start("workstation-4", tmp_path)[0]
    assert not first.from_cache and first.plan.serves("native")
    # The best of three: other work on the machine is not the plan's.
    kept = [start("workstation-4", tmp_path)[0] for _ in range(3)]
    assert all(k.from_cache for k in kept) and min(k.seconds for k in kept) < 1.0
    assert all(k.plan == first.plan and k.report == first.report for k in kept)
    assert not start("workstation-4", tmp_path, plugin="0.2.0")[0].from_cache
    assert not start("workstation-4", None)[0].from_cache


def test_c33_a_kernel_that_went_bad_since_is_not_trusted(tmp_path) -> None:
    start("workstation-4", tmp_path)
    sick = start("workstation-4", tmp_path, fault=unwritten)[0]
    assert not sick.from_cache and not sick.plan.serves("native")
    assert any("sums wrong" in v.reason for v in sick.vetoes)


def test_a_failed_machine_is_probed_again(tmp_path) -> None:
    bad = start("iommu-translated", tmp_path, arrival_s=0.5)[0]
    assert not bad.plan.serves("native") and bad.vetoes
    assert not list(tmp_path.iterdir())


def test_c15_user_switch_off_needs_no_probe_and_force_overrules_it(caplog) -> None:
    off = start("workstation-4", None, environ={"NCCL_P2P_DISABLE": "1"})[0]
    assert off.report is None and not off.plan.serves("native")
    with caplog.at_level(logging.INFO):
        log_once(off, 0)
        log_once(off, 1)
    lines = [r.getMessage() for r in caplog.records]
    assert len([x for x in lines if "every call stays on nccl" in x]) == 1
    assert len([x for x in lines if "native path is off" in x and "NCCL_P2P_DISABLE=1" in x]) == 1
    assert start("workstation-4", None, environ={"NCCL_P2P_DISABLE": "1"}, force=True)[
        0
    ].plan.serves("native")


def test_c03_a_bad_kernel_falls_back_jointly_with_the_reason() -> None:
    planned = start("workstation-4", None, fault=late_payload)[0]
    assert not planned.plan.serves("native")
    assert planned.vetoes[0].ranks == (2,)


def test_ranks_with_other_software_are_refused_by_name() -> None:
    meet = ThreadExchange(2)

    def body(rank: int) -> str:
        with pytest.raises(CollectiveError) as error:
            plan_group(
                ASKED,
                rank=rank,
                exchange=meet.of(rank),
                identity=identity(ASKED.rows, plugin=f"0.{rank}"),
                cache=None,
                candidates=lambda islands, verdict: [],
            )
        return str(error.value)

    for text in run_ranks(2, body):
        assert "ranks [1]" in text and "(versions: rank 0 has" in text and "'plugin': '0.1'" in text


def test_c34_the_dispatcher_serves_what_the_plan_says_and_counts_it() -> None:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    plan = Plan(
        group="tp",
        world=1,
        hidden=64,
        itemsize=2,
        islands=flat(1),
        entries=(
            Entry(Op.ALL_REDUCE, 4, Choice(backend="native")),
            Entry(Op.ALL_REDUCE, 16, Choice(backend="nccl")),
        ),
    )
    inner = ThreadSum(0, ThreadExchange(1), 1)
    ours = PlannedCommunicator({"native": inner}, lambda h, d, r: plan, CallCounters(registry))
    bf16 = torch.bfloat16
    assert not ours.admits(Op.ALL_REDUCE, 1, 64, bf16), "nobody has verified the machine yet"
    ours.prepare(64, bf16, (4, 16))
    assert ours.admits(Op.ALL_REDUCE, 4, 64, bf16) and not ours.admits(Op.ALL_REDUCE, 5, 64, bf16)
    assert not ours.admits(Op.ALL_REDUCE, 8192, 64, bf16), "C32: prefill stays with SGLang"
    assert not ours.admits(Op.ALL_REDUCE_RMSNORM, 1, 64, bf16)
    assert ours.admits(Op.ALL_REDUCE, 8, 32, bf16) and not ours.admits(Op.ALL_REDUCE, 9, 32, bf16)
    fp32 = torch.float32
    assert ours.admits(Op.ALL_REDUCE, 2, 64, fp32) and not ours.admits(Op.ALL_REDUCE, 3, 64, fp32)
    ours.all_reduce(torch.ones(3, 64, dtype=bf16))
    labels = {
        "group": "tp",
        "op": "all_reduce",
        "backend": "native",
        "schedule": "",
        "size": "16KiB",
    }
    assert registry.get_sample_value("sglang_sm120_collective_calls_total", labels) == 1
    assert ours.calls[Op.ALL_REDUCE] == 1
    ours.close()
    assert inner.closed


def test_c34_every_admitted_row_count_runs_by_the_plans_schedule() -> None:
    entry = Entry(Op.ALL_REDUCE, 8, Choice(backend="native", schedule="two_shot", ctas=8))
    plan = Plan(group="tp", world=1, hidden=64, itemsize=2, islands=flat(1), entries=(entry,))
    inner = ThreadSum(0, ThreadExchange(1), 1)
    ours = PlannedCommunicator({"native": inner}, lambda h, d, r: plan)
    ours.prepare(64, torch.bfloat16, (8,))
    for rows in (3, 3, 8, 9):
        ours.admits(Op.ALL_REDUCE, rows, 64, torch.bfloat16)
    ours.admits(Op.ALL_REDUCE, 3, 32, torch.bfloat16)  # another width of as many rows
    assert inner.told == [
        (Op.ALL_REDUCE, 3, 64, "two_shot", 8),
        (Op.ALL_REDUCE, 8, 64, "two_shot", 8),
        (Op.ALL_REDUCE, 3, 32, "two_shot", 8),
    ]


def test_c01_vetoes_of_a_report_and_the_plan_agree() -> None:
    begin = time.monotonic()
    planned = start("iommu-translated", None, arrival_s=0.5)[0]
    assert planned.report is not None and vetoes(planned.report)
    assert planned.plan.lookup(Op.ALL_REDUCE, 1).backend == "nccl"
    assert time.monotonic() - begin < 5
