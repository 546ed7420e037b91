"""The interface every backend implements, so that hooks and benchmarks never know which one runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class CollectiveError(RuntimeError):
    """A collective could not finish; the text names this rank, the missing rank, the call and its shape."""


class Op(str, Enum):
    """What a call computes; also the key of the plan and of the counters."""

    ALL_REDUCE = "all_reduce"
    ALL_REDUCE_RMSNORM = "all_reduce_rmsnorm"
    ALL_REDUCE_RMSNORM_FP8 = "all_reduce_rmsnorm_fp8"


class Communicator(ABC):
    """One group of ranks that sum tensors together.

    A communicator is one logical stream: its calls happen in the same order on every rank. Every
    decision it takes (`admits`, backend, schedule) depends on shape, dtype and construction arguments
    only, so all ranks decide alike. All ranks receive bit-identical sums.

    Attributes:
        name: group name as SGLang calls it ("tp", "attention_tp", "moe_tp", ...).
        rank: this process's index in the group.
        world: number of ranks in the group.
        calls: how many calls of each `Op` were served, the counter behind logs and /metrics.
        canonical: every way it can run adds up in one order, so that ranks with different bits mean that it is broken; of
            another backend only the way that was seen to do so is out.
    """

    canonical = True

    name: str
    rank: int
    world: int

    def __init__(self, name: str, rank: int, world: int) -> None:
        self.name = name
        self.rank = rank
        self.world = world
        self.calls: Counter[Op] = Counter()

    @abstractmethod
    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        """Whether this communicator serves the call; a pure function, equal on every rank."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all ranks as a new tensor.

        Args:
            x: [rows, hidden] (any leading dims), contiguous, bf16/fp16/fp32.

        Raises:
            CollectiveError: a rank did not arrive within the bound, or called another shape.
        """

    @abstractmethod
    def all_reduce_rmsnorm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        gemma: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum `x` over ranks, add it to `residual`, and normalise.

        residual_out = round(sum) + residual, rounded to the dtype;
        normed = residual_out * rsqrt(mean(residual_out**2) + eps) * weight, with (1 + weight) if `gemma`.

        Args:
            x: [rows, hidden] this rank's partial sum.
            residual: [rows, hidden], the same on every rank, same dtype as `x`; not modified.
            weight: [hidden], dtype of `x` or fp32.
            eps: added to the mean square.

        Returns:
            (normed, residual_out), both [rows, hidden] in the dtype of `x`, freshly allocated.

        Raises:
            CollectiveError: as for `all_reduce`.
        """

    # The next ones are not abstract: a backend that has nothing to do there says so by not defining them.
    def prepare(  # noqa: B027
        self, hidden: int, dtype: torch.dtype, rows: Sequence[int]
    ) -> None:
        """Do what may not happen inside graph capture or in the first call: probe, measure, plan, warm up.

        Collective. Called once per model before its graphs are captured; by default there is nothing to do.

        Args:
            hidden: width of the model's activations.
            rows: row counts of the captured decode and verify batches, ascending; empty when no graph is captured.
        """

    def ways(self, op: Op) -> Sequence[tuple[str, int]]:
        """(schedule, CTAs) pairs that a plan may choose between for `op`; ("", 0) is the backend's own choice."""
        return (("", 0),)

    def choose(  # noqa: B027
        self, op: Op, rows: int, hidden: int, schedule: str, ctas: int = 0
    ) -> None:
        """Run calls of `op` with `rows` rows that way from now on, one of `ways` or ("", 0); alike on every rank."""

    def prefetch_in_next(  # noqa: B027
        self, chunks: torch.Tensor, first: int, count: int, ctas: int
    ) -> None:
        """Let the next fused call bring memory into L2 while it waits for its peers; no result changes.

        Args:
            chunks: int64 [n, 2] on the device: address and bytes, multiples of 16. It must outlive every replay of a
                graph that captured the call.
            first, count: which of its rows.
            ctas: further thread blocks that do it, at least 1.
        """

    def set_timeout_ms(self, timeout_ms: int) -> None:  # noqa: B027
        """Change how long later calls wait for a missing rank; by default the bound of the constructor stays."""

    def poll(self) -> None:  # noqa: B027
        """Raise what a kernel reported since the last call; backends whose calls raise themselves do nothing.

        Raises:
            CollectiveError: a rank did not arrive in an earlier asynchronous call.
        """

    @abstractmethod
    def close(self) -> None:
        """Release memory and handles; needs no other rank, may be called twice."""


def norm_inputs(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a fused call is given, contiguous, once it fits together.

    Raises:
        ValueError: `residual` or `weight` does not fit `x`; the text has both shapes and dtypes.
    """
    import torch

    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual {tuple(residual.shape)} {residual.dtype} must match x {tuple(x.shape)} {x.dtype}"
        )
    if weight.shape != x.shape[-1:] or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"weight {tuple(weight.shape)} {weight.dtype} must be [{x.shape[-1]}], {x.dtype} or float32"
        )
    return x.contiguous(), residual.contiguous(), weight.detach().contiguous()
