"""A communicator that serves exactly what its plan says, and counts what it served."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_sm120.comm.communicator import Communicator, Op
from sglang_sm120.comm.counters import CallCounters
from sglang_sm120.comm.plan import Plan

# Makes the plan of a group for (hidden, dtype, widest rows): collective, see `warmup.plan_group`.
PlanMaker = Callable[[int, torch.dtype, int | None], Plan]


class PlannedCommunicator(Communicator):
    """Our backend behind a plan: it admits the calls that the plan gives to it and leaves the rest to SGLang.

    Before `prepare` there is no plan and nothing is admitted: nobody has verified the machine yet.

    Args:
        inner: the backend's communicator, closed with this one.
        backend: the name under which the plan knows it.
        plan_for: makes the plan in `prepare`.
        counters: where served calls are counted; None counts nowhere but in `calls`.
        choose: makes the backend run calls of an operation and row count by a schedule, where it can be told.
    """

    def __init__(
        self,
        inner: Communicator,
        backend: str,
        plan_for: PlanMaker,
        counters: CallCounters | None = None,
        choose: Callable[[Op, int, str], None] | None = None,
    ) -> None:
        super().__init__(inner.name, inner.rank, inner.world)
        self.inner = inner
        self.backend = backend
        self.plan: Plan | None = None
        self.calls = inner.calls
        self._plan_for = plan_for
        self._counters = counters
        self._choose = choose
        self._chosen: set[tuple[Op, int]] = set()

    def prepare(self, hidden: int, dtype: torch.dtype, max_rows: int | None) -> None:
        self.inner.prepare(hidden, dtype, max_rows)
        # The draft model shares the target's groups; the wider of the two plans stays.
        if self.plan is None or hidden > self.plan.hidden:
            self.plan = self._plan_for(hidden, dtype, max_rows)
            self._chosen.clear()
            if self._counters:
                self._counters.announce(self.plan)

    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        if self.plan is None:
            return False
        # Rows of another width count by their bytes.
        choice = self.plan.lookup(op, -(-rows * hidden // self.plan.hidden))
        if choice.backend != self.backend:
            return False
        if self._choose and choice.schedule and (op, rows) not in self._chosen:
            self._choose(op, rows, choice.schedule)
            self._chosen.add((op, rows))
        return self.inner.admits(op, rows, hidden, dtype)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._count(Op.ALL_REDUCE, x)
        return self.inner.all_reduce(x)

    def all_reduce_rmsnorm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        gemma: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._count(Op.ALL_REDUCE_RMSNORM, x)
        return self.inner.all_reduce_rmsnorm(x, residual, weight, eps, gemma=gemma)

    def set_timeout_ms(self, timeout_ms: int) -> None:
        self.inner.set_timeout_ms(timeout_ms)

    def poll(self) -> None:
        self.inner.poll()

    def close(self) -> None:
        self.inner.close()

    def _count(self, op: Op, x: torch.Tensor) -> None:
        if self._counters is not None and self.plan is not None and x.numel():
            self._counters.count(self.plan, op, -(-x.numel() // self.plan.hidden))
