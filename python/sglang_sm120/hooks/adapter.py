"""SGLang's custom all-reduce interface around one of our communicators."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from sglang_sm120.comm.communicator import CollectiveError, Communicator, Op

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("sglang_sm120")


class Sm120AllReduce:
    """What `GroupCoordinator.ca_comm` holds for a group that we serve.

    SGLang reads the attributes and methods up to `close` by name. None of them may be called
    `fused_allreduce_rmsnorm`, `obj` or `has_multicast`: SGLang would take those for its own kernels, and its
    caller of the first swallows errors.

    Args:
        theirs: what SGLang would have held itself. It keeps the sums that our communicator does not admit, so
            that nothing is slower than without us.
    """

    def __init__(
        self,
        communicator: Communicator,
        group: ProcessGroup,
        device: torch.device,
        theirs: Any = None,
    ) -> None:
        self.communicator = communicator
        self.theirs = None if getattr(theirs, "disabled", True) else theirs
        self.group = group
        self.device = device
        self.world_size = communicator.world
        self.disabled = False
        self.original_disabled = False

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Whether the plain sum of `inp` is ours, or SGLang's own; a function of its shape and dtype only."""
        return self.admits_sum(inp) or (
            self.theirs is not None and bool(self.theirs.should_custom_ar(inp))
        )

    def admits_sum(self, inp: torch.Tensor) -> bool:
        """Whether the plain sum of `inp` is ours."""
        rows, hidden = rows_of(inp)
        return rows > 0 and self.communicator.admits(Op.ALL_REDUCE, rows, hidden, inp.dtype)

    def custom_all_reduce(self, inp: torch.Tensor) -> torch.Tensor:
        """The sum over the group as a new tensor, after `should_custom_ar` said yes.

        Raises:
            CollectiveError: a rank did not take part.
        """
        if self.theirs is not None and not self.admits_sum(inp):
            return self.theirs.custom_all_reduce(inp)
        with _Reported():
            return self.communicator.all_reduce(inp.contiguous())

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Entered around CUDA graph capture; our kernels need no registration of captured buffers."""
        with contextlib.nullcontext() if self.theirs is None else self.theirs.capture():
            yield

    def poll(self) -> None:
        """Raise what an asynchronous call reported since the last poll.

        Raises:
            CollectiveError: a rank did not take part.
        """
        with _Reported():
            self.communicator.poll()

    def close(self) -> None:
        self.disabled = True
        self.communicator.close()
        if self.theirs is not None:
            self.theirs.close()

    def admits_sum_add_norm(self, like: torch.Tensor) -> bool:
        """Whether all-reduce + residual + RMSNorm on tensors shaped like `like` ([rows, hidden]) is ours."""
        rows, hidden = rows_of(like)
        return rows > 0 and self.communicator.admits(
            Op.ALL_REDUCE_RMSNORM, rows, hidden, like.dtype
        )

    def sum_add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        gemma: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, residual_out) of the sum of `x` over the group; see `Communicator.all_reduce_rmsnorm`.

        Raises:
            CollectiveError: a rank did not take part.
        """
        with _Reported():
            return self.communicator.all_reduce_rmsnorm(
                x.contiguous(), residual.contiguous(), weight, eps, gemma=gemma
            )


def rows_of(x: torch.Tensor) -> tuple[int, int]:
    """(rows, hidden) of a tensor seen as [rows, hidden]; (0, 0) if it has no elements."""
    if x.dim() == 0 or x.numel() == 0:
        return 0, 0
    return x.numel() // x.shape[-1], x.shape[-1]


class _Reported:
    """Around a call: a name in the trace, and a failure's sentence on a line of its own, which is what people search for.

    SGLang logs a traceback and ends the server.
    """

    __slots__ = ("_range",)

    def __enter__(self) -> None:
        self._range: Any = None
        # A CPU server's trace has no kernel to show for it.
        if torch.autograd._profiler_enabled():
            self._range = torch.profiler.record_function("sm120:all_reduce")
            self._range.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._range is not None:
            self._range.__exit__(kind, error, trace)
        if isinstance(error, CollectiveError):
            logger.critical("sglang-sm120: %s", error)
