"""The plain all-reduce: our communicator in the place of SGLang's custom all-reduce, one per group of ranks."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.plugins.hook_registry import HookType

from sglang_sm120.comm import factory
from sglang_sm120.comm.candidates import Baseline
from sglang_sm120.comm.choosing import PlanRefused
from sglang_sm120.comm.communicator import CollectiveError
from sglang_sm120.hooks import rows
from sglang_sm120.hooks import session as sessions
from sglang_sm120.hooks.adapter import Sm120AllReduce
from sglang_sm120.hooks.census import CENSUS, Sum
from sglang_sm120.hooks.contract import Binding, Part, Target

logger = logging.getLogger("sglang_sm120")

# Groups whose sums SGLang leaves to NCCL when they are not the whole TP group, although they are on the critical path.
SPLIT_GROUPS = frozenset({"moe_tp", "moe_ep", "shared_experts_tp"})

_group_name: contextvars.ContextVar[str] = contextvars.ContextVar("sm120_group_name", default="")


def current_group() -> str:
    """Name of the group that SGLang is making at this moment; empty outside `init_model_parallel_group`."""
    return _group_name.get()


class CountedAllReduce(Sm120AllReduce):
    """The adapter that also books its plain sums in the census."""

    def custom_all_reduce(self, inp: Any) -> Any:
        ours = self.theirs is None or self.admits_sum(inp)
        CENSUS.note(Sum.PLAIN if ours else Sum.SGLANG)
        return super().custom_all_reduce(inp)


def name_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `init_model_parallel_group`: remember the group's name, and ask for a custom all-reduce."""
    name = kwargs.get("group_name") or (args[6] if len(args) > 6 else None) or "anonymous"
    if name in SPLIT_GROUPS and len(args) < 5:
        kwargs["use_custom_allreduce"] = True
    token = _group_name.set(name)
    try:
        return original(*args, **kwargs)
    finally:
        _group_name.reset(token)


def dispatch(original: Callable[..., Any], group: Any, device: Any) -> Any:
    """Around `dispatch_custom_allreduce`: our adapter, or SGLang's choice where the group declined.

    SGLang calls what this returns like a class, with the same two arguments, and turns any error into a warning.
    """
    session = sessions.current()
    name = current_group() or "anonymous"
    # A split expert group asked for a custom all-reduce on our account only; ranks on one GPU look like NVLink.
    ours_only = name in SPLIT_GROUPS or session.options.shared_gpu
    theirs = None if ours_only else _sglangs_own(original, group, device)
    own = SglangSum(group, theirs)
    session.announce()
    baseline = Baseline(own.sum, own.capture, own.add_norm)
    try:
        outcome = factory.build(name, group, device, session.options, baseline=baseline)
    except Exception as error:
        # SGLang would make a warning of it and serve on, on this rank alone, while the others wait for it.
        logger.exception("sglang-sm120: rank %d, group %s", session.tp_rank, name)
        sessions.refuse(
            f'rank {session.tp_rank} could not set up group "{name}" ({type(error).__name__}: {error}); '
            "see the lines above, or start without --enable-sm120-fusion"
        )
    session.outcomes[name] = outcome
    if session.tp_rank == 0:
        logger.info("sglang-sm120: %s", outcome.reason)
    if outcome.communicator is None:
        if session.options.backend not in ("auto", "nccl"):
            sessions.refuse(
                f"{outcome.reason}; --sm120-backend {session.options.backend} was asked for"
            )
        return lambda group, device: theirs
    adapter = CountedAllReduce(outcome.communicator, group, device, theirs)
    session.adopt(name, outcome, adapter)
    return lambda group, device: adapter


def _sglangs_own(original: Callable[..., Any], group: Any, device: Any) -> Any:
    """The custom all-reduce that SGLang would use here, or None where it has none."""
    try:
        return original(group=group, device=device)(group=group, device=device)
    except Exception as error:  # what SGLang itself makes a warning of
        logger.debug("sglang-sm120: SGLang has no custom all-reduce for this group: %s", error)
        return None


class SglangSum:
    """The sum that SGLang would make without us: its own kernels in its order where they take the tensor, else NCCL."""

    def __init__(self, group: Any, theirs: Any) -> None:
        self._group = group
        self._theirs = None if getattr(theirs, "disabled", True) else theirs
        self._norms: dict[int, RMSNorm] = {}

    def sum(self, x: torch.Tensor) -> None:
        """Sum `x` over the group; NCCL does it in place."""
        if self._theirs is not None and self._theirs.should_custom_ar(x):
            self._theirs.custom_all_reduce(x)
            return
        coordinator = self._coordinator()
        # FlashInfer's, with SGLANG_ENABLE_PCIE_IPC_ALLREDUCE; its workspace was made right before our plan.
        pcie = coordinator.pcie_ipc_comm
        if pcie is not None and not pcie.disabled and pcie.should_pcie_ipc_ar(x):
            pcie.pcie_ipc_all_reduce(x)
            return
        own = coordinator.pynccl_comm
        if own is None:
            torch.distributed.all_reduce(x, group=coordinator.device_group)
            return
        with own.change_state(enable=True):
            own.all_reduce(x)

    def capture(self) -> Any:
        """SGLang's custom all-reduce registers captured buffers; a graph without that reads unset addresses."""
        return contextlib.nullcontext() if self._theirs is None else self._theirs.capture()

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> object:
        """Residual add and RMSNorm by the kernel that SGLang's own layer calls."""
        norm = self._norms.get(x.shape[-1])
        if norm is None:
            norm = self._norms[x.shape[-1]] = RMSNorm(x.shape[-1], eps=eps)
            norm.weight = torch.nn.Parameter(weight, requires_grad=False)
        return norm(x, residual)

    def _coordinator(self) -> Any:
        # SGLang registers the coordinator only after it has made its custom all-reduce.
        for known in parallel_state._groups.values():
            coordinator = known()
            if coordinator is not None and coordinator.cpu_group is self._group:
                return coordinator
        raise LookupError("SGLang has no group with this process group")


def prepare(runner: Any, captured: Sequence[int]) -> None:
    """Plan and warm every communicator for a model, before its graphs are captured; ends the rank where that fails."""
    model = runner.model_runner
    try:
        for adapter in sessions.current().adapters:
            adapter.communicator.prepare(model.model_config.hidden_size, model.dtype, captured)
    except (PlanRefused, CollectiveError) as refused:
        sessions.refuse(str(refused))


def prepare_workspace(result: Any, self: Any) -> None:
    """After SGLang's own workspace step, before any graph is captured."""
    prepare(self, rows.of_graphs(self))


PART = Part(
    "all_reduce",
    (
        Binding(
            Target(
                "sglang.srt.distributed.parallel_state.init_model_parallel_group",
                "(group_ranks, local_rank, backend, use_pynccl=..., use_custom_allreduce=..., "
                "use_message_queue_broadcaster=..., group_name=..., use_mscclpp=..., "
                "use_torch_symm_mem_allreduce=..., recovered_rank=..., rank_offset=..., max_world_size=...)",
                "learns the group's name; asks for a custom all-reduce in split expert groups",
            ),
            HookType.AROUND,
            name_group,
        ),
        Binding(
            Target(
                "sglang.srt.distributed.device_communicators.custom_all_reduce.dispatch_custom_allreduce",
                "(group, device)",
                "puts our communicator in the place of SGLang's custom all-reduce",
            ),
            HookType.AROUND,
            dispatch,
        ),
        Binding(
            Target(
                "sglang.srt.model_executor.runner.base_runner.BaseRunner._pre_initialize_pcie_ipc_workspace",
                "(self)",
                "prepares our workspaces before CUDA graphs are captured",
            ),
            HookType.AFTER,
            prepare_workspace,
        ),
    ),
)
