"""Several backends behind one plan: who may compete, what is planned, and what a second start needs.

Ranks are threads; the backends sum for real through a `ThreadExchange` and are timed by a clock of the test's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from sglang_sm120.comm import candidates, cuda_library, start
from sglang_sm120.comm.candidates import Baseline
from sglang_sm120.comm.choosing import PlanRefused
from sglang_sm120.comm.communicator import CollectiveError, Communicator, Op
from sglang_sm120.comm.counters import CallCounters
from sglang_sm120.comm.dispatch import PlannedCommunicator
from sglang_sm120.fabric import machine
from sglang_sm120.fabric.driver import NoAccess
from sglang_sm120.fabric.islands import flat
from sglang_sm120.fabric.software import SoftwareFabric, ThreadExchange, run_ranks
from sglang_sm120.fabric.verdict import Verdict, Veto
from sglang_sm120.fabric.versions import Versions

FIXTURES = Path(__file__).parents[1] / "fixtures" / "machines"
WORLD, HIDDEN, BF16, ROWS = 4, 512, torch.bfloat16, (1, 4, 8, 32)
SOUND, OLD = Versions(flashinfer="0.7.2"), Versions(flashinfer="0.6.14")


@dataclass
class Rig:
    """One start of a group: how fast each backend is, and what happened.

    Attributes:
        us: (backend, schedule, CTAs) -> microseconds per call.
        made: backends that were made, in order, per rank 0.
    """

    us: dict[str, float] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    wrong: str = ""  # schedule whose sums are wrong
    misnormed: str = (
        ""  # what the fused calls of native get wrong on rank 3: "residual" or "normed"
    )
    uneven: str = ""  # schedule whose sums differ between ranks in their last bits
    flashinfer_ways: tuple[tuple[str, int], ...] = (("pcie_staged", 8),)


class Backend(Communicator):
    """Sums over threads; every call is said to take what the rig says."""

    def __init__(
        self, rig: Rig, name: str, rank: int, meet: ThreadExchange, ways: Sequence[tuple[str, int]]
    ) -> None:
        super().__init__("tp", rank, WORLD)
        self.backend, self.rig, self._exchange, self._ways = name, rig, meet.of(rank), ways
        self.canonical = name != "flashinfer"
        self.now: dict[tuple[Op, int], tuple[str, int]] = {}
        self.prepared: list[tuple[int, tuple[int, ...]]] = []
        self.failing = ""
        if rank == 0:
            rig.made.append(name)

    def prepare(self, hidden: int, dtype: torch.dtype, rows: Sequence[int]) -> None:
        if self.failing:
            raise CollectiveError(self.failing)
        self.prepared.append((hidden, tuple(rows)))

    def ways(self, op: Op) -> Sequence[tuple[str, int]]:
        return self._ways

    def choose(self, op: Op, rows: int, hidden: int, schedule: str, ctas: int = 0) -> None:
        self.now[op, rows] = (schedule, ctas)

    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        return True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.stack(self._exchange(x)).float().sum(0).to(x.dtype)
        schedule = self.now.get((Op.ALL_REDUCE, x.shape[0]), ("", 0))[0]
        if schedule == self.rig.wrong != "":
            total[0, 0] += 1
        if schedule == self.rig.uneven != "" and self.rank == 1 and bool((x != x.round()).any()):
            total[0] *= 1.01
        return total

    def all_reduce_rmsnorm(self, x, residual, weight, eps, *, gemma=False):  # type: ignore[no-untyped-def]
        out = self.all_reduce(x) + residual
        normed = torch.nn.functional.rms_norm(out, x.shape[-1:], weight, eps)
        if self.backend == "native" and self.rank == 3:
            if self.rig.misnormed == "residual":
                out = out - residual
            if self.rig.misnormed == "normed":
                normed[-1, -1] = float("nan")
        return normed, out

    def close(self) -> None:
        pass


class WithFp8(Backend):
    """One that has the FP8 epilogue too."""

    def all_reduce_rmsnorm_fp8(self, x, residual, weight, eps, **how):  # type: ignore[no-untyped-def]
        normed, out = self.all_reduce_rmsnorm(x, residual, weight, eps)
        return normed, torch.ones(len(x), 1), out


def start_all(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    box: str = "workstation-4",
    versions: Versions = SOUND,
    cache: Path | None = None,
    environ: dict[str, str] | None = None,
    pin: str = "",
    primary: type[Backend] = Backend,
    extras: tuple[str, ...] = ("mailbox", "flashinfer"),
    tune: Callable[[Backend], None] = lambda made: None,
    counters: CallCounters | None = None,
    fp8: bool = False,
) -> list[PlannedCommunicator]:
    """Start the ranks of a described machine whose `native` backend may be joined by others."""
    ways = {"native": (("one_shot", 0), ("one_shot", 8), ("two_shot", 0)), "mailbox": (("", 0),), "flashinfer": rig.flashinfer_ways}  # fmt: skip
    fabric = SoftwareFabric(machine.load(FIXTURES / box / "fabric.toml"))
    meets = {name: ThreadExchange(WORLD) for name in ("group", *ways)}

    def timed(call: Callable[[], object], *_: Any) -> float:
        return float(call())  # type: ignore[arg-type]

    def call_of(inner: Backend, op: Op, rows: int, *_: Any) -> Callable[[], float]:
        schedule, ctas = inner.now[op, rows]
        name = "/".join(p for p in (inner.backend, schedule, f"{ctas}c" * (ctas > 0)) if p)
        return lambda: rig.us.get(name, rig.us.get(inner.backend, 10.0)) + 0.05 * rows

    monkeypatch.setattr(candidates, "_call", call_of)
    monkeypatch.setattr(candidates.timing, "call_us", timed)
    monkeypatch.setattr(
        candidates, "_baseline_timer", lambda *_: lambda op, rows: rig.us["nccl"] + 0.05 * rows
    )

    def body(rank: int) -> PlannedCommunicator:
        def maker(name: str) -> Callable[[], Communicator]:
            def make() -> Backend:
                made = Backend(rig, name, rank, meets[name], ways[name])
                tune(made)
                return made

            return make

        ours = start.planned(
            primary(rig, "native", rank, meets["native"], ways["native"]),
            "native",
            start.Setting(
                gpus=tuple(f"GPU-{r}" for r in range(WORLD)),
                hosts=("here",) * WORLD,
                versions=versions,
                islands=flat(WORLD),
                pin=pin,
                environ=environ or {},
                cache=cache,
                fp8=fp8,
            ),
            device=torch.device("cpu"),
            exchange=meets["group"].of(rank),
            baseline=Baseline(lambda x: x),
            driver=lambda: fabric.driver(rank),
            counters=counters if rank == 0 else None,
            extras={name: maker(name) for name in extras},
        )
        ours.prepare(HIDDEN, BF16, ROWS)
        return ours

    ranks = run_ranks(WORLD, body)
    assert len({r.plan.digest() for r in ranks if r.plan}) == 1
    return ranks


def serving(ranks: Sequence[PlannedCommunicator], op: Op = Op.ALL_REDUCE) -> set[str]:
    assert ranks[0].plan is not None
    return {e.choice.name for e in ranks[0].plan.entries if e.op is op}


def test_flashinfer_serves_where_it_is_clearly_the_fastest(monkeypatch) -> None:
    rig = Rig({"nccl": 30.0, "native": 10.0, "flashinfer": 8.0})
    ranks = start_all(rig, monkeypatch)
    assert rig.made == ["native", "flashinfer"], "mailboxes have nothing to win here"
    assert serving(ranks) == {"flashinfer/pcie_staged/8c"}
    assert set(ranks[0].served["flashinfer"].prepared) == {(HIDDEN, ROWS)}  # type: ignore[attr-defined]
    x = torch.ones(3, HIDDEN, dtype=BF16)
    assert all(r.admits(Op.ALL_REDUCE, 3, HIDDEN, BF16) for r in ranks)
    sums = run_ranks(WORLD, lambda r: ranks[r].all_reduce(x))
    assert all(bool((s == WORLD).all()) for s in sums)
    assert ranks[0].served["flashinfer"].now[Op.ALL_REDUCE, 3] == ("pcie_staged", 8)  # type: ignore[attr-defined]
    assert ranks[0].calls[Op.ALL_REDUCE] == 1, "calls that were only timed do not count"


def test_flashinfer_does_not_serve_for_a_few_percent(monkeypatch) -> None:
    rig = Rig({"nccl": 30.0, "native": 10.0, "flashinfer": 9.5})
    assert serving(start_all(rig, monkeypatch)) <= {"native/one_shot", "native/one_shot/8c", "native/two_shot"}  # fmt: skip


def test_c18_an_old_flashinfer_is_not_even_made(monkeypatch) -> None:
    rig = Rig({"nccl": 30.0, "native": 10.0, "flashinfer": 1.0})
    ranks = start_all(rig, monkeypatch, versions=OLD)
    assert rig.made == ["native"] and not ranks[0].plan.serves("flashinfer")


def test_the_cta_count_that_is_fastest_serves(monkeypatch) -> None:
    rig = Rig({"nccl": 30.0, "native": 10.0, "native/one_shot/8c": 7.0, "flashinfer": 20.0})
    assert serving(start_all(rig, monkeypatch)) == {"native/one_shot/8c"}


@pytest.mark.parametrize("box", ["staged-p2p", "geforce-no-p2p"])
def test_mailboxes_compete_where_the_machine_stops_peer_memory(monkeypatch, box) -> None:
    rig = Rig({"nccl": 30.0, "native": 1.0, "mailbox": 12.0, "flashinfer": 1.0})
    ranks = start_all(rig, monkeypatch, box=box)
    assert rig.made == ["native", "mailbox"] and serving(ranks) == {"mailbox"}
    assert not ranks[0].served["mailbox"].failing  # type: ignore[attr-defined]
    slow = Rig({"nccl": 10.0, "native": 1.0, "mailbox": 12.0})
    assert serving(start_all(slow, monkeypatch, box=box)) == {"nccl"}


def test_c15_a_user_who_switched_peer_to_peer_off_gets_no_other_kernels_either(monkeypatch) -> None:
    rig = Rig({"nccl": 30.0, "native": 1.0, "mailbox": 1.0, "flashinfer": 1.0})
    ranks = start_all(rig, monkeypatch, environ={"NCCL_P2P_DISABLE": "1"})
    assert rig.made == ["native"] and serving(ranks) == {"nccl"}


def test_a_further_backend_that_cannot_be_set_up_is_left_out_with_a_line(
    monkeypatch, caplog
) -> None:
    def break_it(made: Backend) -> None:
        made.failing = "tp: FlashInfer has no kernel for this group (pcie: rank 2: error 101)"

    rig = Rig({"nccl": 30.0, "native": 10.0, "flashinfer": 1.0})
    with caplog.at_level(logging.WARNING):
        ranks = start_all(rig, monkeypatch, tune=break_it)
    assert not ranks[0].plan.serves("flashinfer") and ranks[0].plan.serves("native")
    assert any("flashinfer is left out of group tp" in m and "error 101" in m for m in caplog.messages)  # fmt: skip


@pytest.mark.parametrize("wrong, backend", [("pcie_staged", "flashinfer"), ("two_shot", "native")])
def test_every_way_a_backend_can_run_must_prove_its_sums(monkeypatch, wrong, backend) -> None:
    rig = Rig({"nccl": 30.0, "native": 10.0, "flashinfer": 1.0}, wrong=wrong)
    ranks = start_all(rig, monkeypatch)
    assert not ranks[0].plan.serves(backend)
    note = " ".join(ranks[0].plan.notes)
    assert f"the {backend} kernel gives wrong sums" in note and f"by {wrong}" in note


@pytest.mark.parametrize("what", ["residual", "normed"])
def test_the_fused_kernel_must_prove_itself_too(monkeypatch, what) -> None:
    rig = Rig({"nccl": 30.0, "native": 1.0, "flashinfer": 10.0}, misnormed=what)
    ranks = start_all(rig, monkeypatch)
    assert not ranks[0].plan.serves("native") and ranks[0].plan.serves("flashinfer")
    assert "rank 3: " in " ".join(ranks[0].plan.notes) and "fused" in " ".join(ranks[0].plan.notes)


def test_a_way_that_gives_the_ranks_different_bits_does_not_serve(monkeypatch) -> None:
    rig = Rig({"nccl": 30.0, "native": 10.0, "flashinfer": 1.0}, uneven="pcie_staged")
    ranks = start_all(rig, monkeypatch)
    assert ranks[0].plan.serves("native") and not ranks[0].plan.serves("flashinfer")
    (note,) = ranks[0].plan.notes
    assert note == "flashinfer/pcie_staged/8c is off: the flashinfer kernel gives the ranks different bits (by pcie_staged on 8 CTAs)"  # fmt: skip


def test_the_other_ways_of_such_a_backend_may_serve_and_the_plan_is_kept(
    monkeypatch, tmp_path
) -> None:
    ways = (("pcie_staged", 8), ("pcie_staged", 16), ("trtllm_one_shot", 0))
    us = {"nccl": 30.0, "native": 10.0, "flashinfer": 1.0, "flashinfer/trtllm_one_shot": 5.0}
    rig = Rig(us, uneven="pcie_staged", flashinfer_ways=ways)
    first = start_all(rig, monkeypatch, cache=tmp_path)
    assert serving(first) == {"flashinfer/trtllm_one_shot"}
    off = [note.split(" is off: ")[0] for note in first[0].plan.notes]
    assert off == ["flashinfer/pcie_staged/8c", "flashinfer/pcie_staged/16c"]
    rig.us = {"nccl": 1.0}  # a new plan would leave everything to NCCL
    again = start_all(rig, monkeypatch, cache=tmp_path)
    assert again[0].plan.digest() == first[0].plan.digest()
    rig.uneven = "trtllm_one_shot"  # and now the way that serves
    assert serving(start_all(rig, monkeypatch, cache=tmp_path)) == {"nccl"}


def test_a_pinned_backend_without_a_sound_way_says_which_were_not(monkeypatch) -> None:
    rig = Rig({"nccl": 30.0, "native": 10.0, "flashinfer": 1.0}, uneven="pcie_staged")
    with pytest.raises(PlanRefused, match="flashinfer/pcie_staged/8c is off: .* different bits"):
        start_all(rig, monkeypatch, pin="flashinfer")


def test_different_bits_of_our_own_kernels_stop_all_of_them_and_are_not_kept(
    monkeypatch, tmp_path
) -> None:
    rig = Rig({"nccl": 30.0, "native": 10.0, "native/two_shot": 20.0}, uneven="two_shot")
    assert serving(start_all(rig, monkeypatch, extras=(), cache=tmp_path)) == {"nccl"}
    rig.uneven = ""
    assert "nccl" not in serving(start_all(rig, monkeypatch, extras=(), cache=tmp_path))


def test_c33_a_kept_plan_with_flashinfer_makes_it_again_and_checks_it(
    monkeypatch, tmp_path
) -> None:
    rig = Rig({"nccl": 30.0, "native": 10.0, "flashinfer": 1.0})
    first = start_all(rig, monkeypatch, cache=tmp_path)
    again = start_all(rig, monkeypatch, cache=tmp_path)
    assert again[0].plan.digest() == first[0].plan.digest()
    assert rig.made == ["native", "flashinfer"] * 2
    assert again[0].admits(Op.ALL_REDUCE, 4, HIDDEN, BF16)

    def break_it(made: Backend) -> None:
        made.failing = "no memory"

    third = start_all(rig, monkeypatch, cache=tmp_path, tune=break_it)
    assert not third[0].plan.serves("flashinfer") and third[0].plan.serves("native")


def test_the_baseline_s_settings_are_part_of_what_a_kept_plan_depends_on() -> None:
    told = {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO", "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}
    said = "NCCL_ALGO=Ring SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1"
    assert start.baseline_environment({**told, "HOME": "/"}) == said


@pytest.mark.parametrize("first, then", [("native", ""), ("", "native")])
def test_c33_a_plan_kept_under_another_wish_for_a_backend_is_not_used(
    monkeypatch, tmp_path, first, then
) -> None:
    served = {"": {"nccl"}, "native": {"native/one_shot"}}
    rig = Rig({"nccl": 10.0, "native": 20.0, "native/one_shot": 15.0})
    for pin in (first, then, first):
        ranks = start_all(rig, monkeypatch, cache=tmp_path, pin=pin, extras=())
        assert serving(ranks) == served[pin]


def test_the_fp8_epilogue_is_planned_where_a_backend_has_one_and_someone_asks(monkeypatch) -> None:
    rig = Rig({"nccl": 30.0, "native": 10.0})
    unasked = start_all(rig, monkeypatch, extras=(), primary=WithFp8)
    assert {e.op for e in unasked[0].plan.entries} == {Op.ALL_REDUCE, Op.ALL_REDUCE_RMSNORM}
    without = start_all(rig, monkeypatch, extras=(), fp8=True)
    assert without[0].plan.lookup(Op.ALL_REDUCE_RMSNORM_FP8, 4).backend == "nccl"
    assert not without[0].admits(Op.ALL_REDUCE_RMSNORM_FP8, 4, HIDDEN, BF16)
    registry = CollectorRegistry()
    ranks = start_all(
        rig, monkeypatch, extras=(), primary=WithFp8, counters=CallCounters(registry), fp8=True
    )
    entries = [e for e in ranks[0].plan.entries if e.op is Op.ALL_REDUCE_RMSNORM_FP8]
    assert [e.rows for e in entries] == list(ROWS)
    assert {e.choice.backend for e in entries} == {"native"}
    assert ranks[0].admits(Op.ALL_REDUCE_RMSNORM_FP8, 4, HIDDEN, BF16)
    x = torch.ones(4, HIDDEN, dtype=BF16)
    weight = torch.ones(HIDDEN, dtype=BF16)
    out = run_ranks(WORLD, lambda r: ranks[r].all_reduce_rmsnorm_fp8(x, x, weight, 1e-6))
    assert bool((out[0][2] == WORLD + 1).all())
    counted = [
        s
        for m in registry.collect()
        for s in m.samples
        if s.name == "sglang_sm120_collective_calls_total"
    ]
    assert [(s.labels["op"], s.value) for s in counted] == [("all_reduce_rmsnorm_fp8", 1.0)]


class Dying(Backend):
    """One whose asynchronous calls fail on rank 2 once a number of calls were timed; it says so when it is polled."""

    timed = 0
    last = 10**9

    def choose(self, op: Op, rows: int, hidden: int, schedule: str, ctas: int = 0) -> None:
        super().choose(op, rows, hidden, schedule, ctas)
        self.timed += 1

    def poll(self) -> None:
        if self.rank == 2 and self.timed >= self.last:
            raise CollectiveError("tp, call 70, rank 2: rank 3 is missing in all_reduce")


class DyingLate(Dying):
    last = 40


def test_a_backend_that_the_plan_does_not_use_cannot_end_the_server(monkeypatch) -> None:
    class Dead(Dying):
        last = 0

    ranks = start_all(Rig({"nccl": 1.0, "native": 10.0}), monkeypatch, primary=Dead, extras=())
    assert serving(ranks) == {"nccl"}
    for rank in ranks:
        rank.poll()


def test_a_backend_that_fails_while_it_is_timed_is_left_out_on_all_ranks(monkeypatch) -> None:
    rig = Rig({"nccl": 30.0, "native": 10.0, "flashinfer": 20.0})
    ranks = start_all(rig, monkeypatch, primary=DyingLate)
    assert not ranks[0].plan.serves("native") and ranks[0].plan.serves("flashinfer")
    assert "rank 2: tp, call 70, rank 2: rank 3 is missing" in " ".join(ranks[0].plan.notes)
    for rank in ranks:
        rank.poll()
    with pytest.raises(PlanRefused, match="--sm120-backend native.*rank 3 is missing"):
        start_all(rig, monkeypatch, primary=DyingLate, pin="native", extras=())


def test_a_call_that_the_plan_leaves_to_sglang_is_an_error_that_says_what_to_ask(
    monkeypatch,
) -> None:
    ranks = start_all(Rig({"nccl": 1.0, "native": 10.0}), monkeypatch, extras=())
    assert not ranks[0].admits(Op.ALL_REDUCE, 4, HIDDEN, BF16)
    with pytest.raises(CollectiveError, match=r"rank 0: the plan leaves all_reduce of \(4, 512\)"):
        ranks[0].all_reduce(torch.ones(4, HIDDEN, dtype=BF16))


def test_a_pinned_backend_that_cannot_be_prepared_is_refused_on_every_rank(monkeypatch) -> None:
    class Broken(Backend):
        def prepare(self, hidden: int, dtype: torch.dtype, rows: Sequence[int]) -> None:
            raise CollectiveError("tp: no workspace on rank 3")

    with pytest.raises(PlanRefused, match="--sm120-backend native.*no workspace on rank 3"):
        start_all(Rig({"nccl": 1.0}), monkeypatch, primary=Broken, pin="native", extras=())


def test_who_competes_is_a_function_of_the_verdict() -> None:
    verdict = Verdict()
    assert start.competes("flashinfer", "native", verdict)
    assert not start.competes("mailbox", "native", verdict)
    verdict.veto(Veto(target="p2p", reason="stores never arrive"))
    assert start.competes("mailbox", "native", verdict)
    assert not start.competes("flashinfer", "native", verdict)
    verdict.veto(Veto(target="p2p", reason="NCCL_P2P_DISABLE=1", wish=True))
    assert not start.competes("mailbox", "native", verdict)


def test_without_the_cuda_library_on_one_rank_nothing_is_probed_on_any(monkeypatch) -> None:
    rank_of = threading.local()

    def missing() -> object:
        if rank_of.rank == 1:
            raise cuda_library.CudaLibraryMissing("no CUDA toolkit found")
        return object()

    monkeypatch.setattr(cuda_library, "cuda_library", missing)
    meet = ThreadExchange(2)

    def body(rank: int) -> str:
        rank_of.rank = rank
        with pytest.raises(NoAccess) as error:
            start.gpu_edges(rank, 2, meet.of(rank), torch.device("cuda", 0))()
        return str(error.value)

    texts = run_ranks(2, body)
    assert texts[0] == texts[1] and "rank 1: no CUDA toolkit found" in texts[0]
