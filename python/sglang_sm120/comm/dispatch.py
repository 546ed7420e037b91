"""A communicator that serves exactly what its plan says, and counts what it served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sglang_sm120.comm.communicator import CollectiveError, Communicator, Op
from sglang_sm120.comm.counters import CallCounters
from sglang_sm120.comm.plan import Choice, Plan

# Makes the plan of a group for (hidden, dtype, captured rows): collective, see `warmup.plan_group`.
PlanMaker = Callable[[int, torch.dtype, Sequence[int]], Plan]


class PlannedCommunicator(Communicator):
    """Our backends behind a plan: it admits the calls that the plan gives to one of them and leaves the rest to SGLang.

    Before `prepare` there is no plan and nothing is admitted: nobody has verified the machine yet.

    Args:
        served: communicators by the name under which the plan knows them, closed with this one. `plan_for` may add
            more; the first gives this one its name, rank and world.
        plan_for: makes the plan in `prepare`.
        counters: where served calls are counted; None counts nowhere but in `calls`.
    """

    def __init__(
        self,
        served: Mapping[str, Communicator],
        plan_for: PlanMaker,
        counters: CallCounters | None = None,
    ) -> None:
        first = next(iter(served.values()))
        super().__init__(first.name, first.rank, first.world)
        self.served = served
        self.plan: Plan | None = None
        self._plan_for = plan_for
        self._counters = counters
        self._ahead: tuple[torch.Tensor, int, int, int] | None = None
        self._told: dict[tuple[str, Op, int], tuple[int, str, int]] = {}
        # Those of every plan so far: a graph that was captured under an earlier one goes on with it.
        self._used: dict[str, Communicator] = {}

    def prepare(self, hidden: int, dtype: torch.dtype, rows: Sequence[int]) -> None:
        # The draft model shares the target's groups; the wider of the two plans stays.
        if self.plan is None or hidden > self.plan.hidden:
            self.plan = self._plan_for(hidden, dtype, rows)
            self._told.clear()
            self._used |= {n: c for n, c in self.served.items() if self.plan.serves(n)}
            if self._counters:
                self._counters.announce(self.plan)

    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        if self.plan is None:
            return False
        choice = self.plan.lookup(op, self._planned_rows(self.plan, rows, hidden, dtype))
        inner = self.served.get(choice.backend)
        if inner is None:
            return False
        self._tell(inner, choice, op, rows, hidden)
        return inner.admits(op, rows, hidden, dtype)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._server(Op.ALL_REDUCE, x).all_reduce(x)

    def all_reduce_rmsnorm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        gemma: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self._server(Op.ALL_REDUCE_RMSNORM, x)
        if self._ahead is not None:
            inner.prefetch_in_next(*self._ahead)
            self._ahead = None
        return inner.all_reduce_rmsnorm(x, residual, weight, eps, gemma=gemma)

    def all_reduce_rmsnorm_fp8(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        **how: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the backend's own method of this name; only where `admits` said so for this operation."""
        inner: Any = self._server(Op.ALL_REDUCE_RMSNORM_FP8, x)
        return inner.all_reduce_rmsnorm_fp8(x, residual, weight, eps, **how)

    def prefetch_in_next(self, chunks: torch.Tensor, first: int, count: int, ctas: int) -> None:
        self._ahead = (chunks, first, count, ctas)

    def set_timeout_ms(self, timeout_ms: int) -> None:
        for inner in self.served.values():
            inner.set_timeout_ms(timeout_ms)

    def poll(self) -> None:
        # One that failed while it was checked or timed is not used, and its failure is no longer news.
        for inner in self._used.values():
            inner.poll()

    def close(self) -> None:
        for inner in self.served.values():
            inner.close()

    @staticmethod
    def _planned_rows(plan: Plan, rows: int, hidden: int, dtype: torch.dtype) -> int:
        """Rows of another width or dtype count by their bytes."""
        nbytes = rows * hidden * dtype.itemsize
        return -(-nbytes // (plan.hidden * plan.itemsize))

    def _server(self, op: Op, x: torch.Tensor) -> Communicator:
        """The communicator that the plan gives this call to, told how to run it; the call is counted."""
        hidden = x.shape[-1]
        rows = x.numel() // hidden if hidden else 0
        if self.plan is None or not rows:
            self.calls[op] += 1
            return next(iter(self.served.values()))
        planned = self._planned_rows(self.plan, rows, hidden, x.dtype)
        choice = self.plan.lookup(op, planned)
        inner = self.served.get(choice.backend)
        if inner is None:
            raise CollectiveError(
                f"{self.name}, rank {self.rank}: the plan leaves {op.value} of {tuple(x.shape)} to SGLang; "
                "ask admits() before the call"
            )
        self._tell(inner, choice, op, rows, hidden)
        if self._counters is not None:
            self._counters.count(self.plan, op, planned)
        self.calls[op] += 1
        return inner

    def _tell(self, inner: Communicator, choice: Choice, op: Op, rows: int, hidden: int) -> None:
        how = (hidden, choice.schedule, choice.ctas)
        if self._told.get((choice.backend, op, rows)) != how:
            inner.choose(op, rows, *how)
            self._told[choice.backend, op, rows] = how
