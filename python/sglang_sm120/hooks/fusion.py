"""All-reduce + residual add + RMSNorm in one call, at the two places where SGLang lets a kernel take all three.

Every layer has two boundaries. Into the FFN the attention output owes its sum by construction; into the next
attention the FFN output carries the sum it owes (`UnreducedOutput`). SGLang asks its candidates in order, and
each returns None to decline. A candidate declines before it touches anything, and only for reasons that are the
same on every rank: shapes, dtypes, the batch's mode and the server's configuration.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.layers.layer_boundary import (
    FfnInputFusion,
    SumGroup,
    TokenAxis,
    UnreducedOutput,
    get_attn_tp_context,
)
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    is_in_breakable_cuda_graph,
)
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_exec, get_parallel

from sglang_sm120.hooks.adapter import Sm120AllReduce
from sglang_sm120.hooks.census import CENSUS, Sum
from sglang_sm120.hooks.contract import Binding, Part, Seam, Target, lookup
from sglang_sm120.hooks.prefetch import PREFETCH


class FusedBoundary:
    """Our candidates for one stage of one layer.

    Args:
        plan: SGLang's `StagePlan`; its `norm` is the one that reads the sum.
    """

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self._norm = plan.norm
        self._gemma = type(plan.norm) is GemmaRMSNorm

    def attention_input(
        self,
        owed: Any,
        residual: torch.Tensor | None,
        forward_batch: Any,
        post_residual_addition: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Complete the FFN's sum into the next attention's input: (normed, residual), or None."""
        if (
            not isinstance(owed, UnreducedOutput)
            or owed.group is None
            or owed.reduce_to_dp_local is not None
            or owed.complete_sum is not None
            or residual is None
            or not _same_form(owed.partial, residual)
        ):
            return None
        adapter = self._adapter(owed.group, residual, forward_batch)
        if adapter is None:
            return None
        if post_residual_addition is not None:
            residual = residual + post_residual_addition
        CENSUS.note(Sum.FUSED_FFN)
        return self._run(adapter, owed.partial, residual)

    def ffn_input(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, forward_batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Complete the attention's sum into the FFN's input: (normed, residual), or None."""
        if residual is None:
            return None
        adapter = self._adapter(get_parallel().attn_tp_group, residual, forward_batch)
        if adapter is None:
            return None
        if not _same_form(hidden_states, residual):
            # preserves_residual() has promised for this batch that the residual stays as it is.
            return self._norm(
                get_parallel().attn_tp_group.all_reduce(hidden_states), residual.clone()
            )
        CENSUS.note(Sum.FUSED_ATTENTION)
        return self._run(adapter, hidden_states, residual)

    def preserves_residual(self, residual: torch.Tensor, forward_batch: Any) -> bool:
        """Promise that `ffn_input` takes this batch and leaves the residual as it is."""
        return self._adapter(get_parallel().attn_tp_group, residual, forward_batch) is not None

    def _adapter(
        self, group: Any, residual: torch.Tensor, forward_batch: Any
    ) -> Sm120AllReduce | None:
        adapter = group.ca_comm
        if not isinstance(adapter, Sm120AllReduce) or adapter.disabled:
            return None
        mode = forward_batch.forward_mode
        admitted = (
            (mode.is_decode() or mode.is_target_verify())
            and residual.dim() == 2
            and residual.shape[-1] == self._norm.weight.shape[0]
            and self._norm.weight.dtype in (residual.dtype, torch.float32)
            and not forward_batch.can_run_tbo
            and not torch.compiler.is_compiling()
            and not is_in_breakable_cuda_graph()
            # The unfused norm is another function in that mode, and prefill would still use it.
            and not is_batch_invariant_mode_enabled()
            and not get_attn_tp_context().input_scattered
            and not get_exec().comm.enable_quant_communications
            and TokenAxis.ATTN_TP not in self._plan.fused_input_rows(forward_batch).sharded
            and adapter.admits_sum_add_norm(residual)
        )
        return adapter if admitted else None

    def _run(
        self, adapter: Sm120AllReduce, partial: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        PREFETCH.before(self._norm, adapter.communicator, partial.shape[0])
        return adapter.sum_add_norm(
            partial,
            residual,
            self._norm.weight.data,
            self._norm.variance_epsilon,
            gemma=self._gemma,
        )


def is_plain_rms_norm(norm: torch.nn.Module) -> bool:
    """Whether the norm is x * rsqrt(mean(x^2) + eps) * w, or Gemma's (1 + w), over the whole row and no more."""
    if type(norm) is GemmaRMSNorm:
        return True
    return (
        type(norm) is RMSNorm
        and norm.has_weight
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
        and not getattr(norm, "x_pad_to_multiple", 0)
    )


def _same_form(partial: torch.Tensor, residual: torch.Tensor) -> bool:
    return partial.shape == residual.shape and partial.dtype == residual.dtype


class Provider:
    """Our candidates per stage, in the form of SGLang's registry of all-reduce fusions."""

    def attn_input_fusions(self, plan: Any, read: Any = None) -> tuple[Any, ...]:
        return (FusedBoundary(plan).attention_input,) if is_plain_rms_norm(plan.norm) else ()

    def ffn_input_fusions(self, plan: Any) -> tuple[Any, ...]:
        sharded = TokenAxis.ATTN_TP in plan.incoming_residual_rows.sharded
        if sharded or not is_plain_rms_norm(plan.norm):
            return ()
        boundary = FusedBoundary(plan)
        return (
            FfnInputFusion(
                completes=SumGroup.ATTN_TP,
                run=boundary.ffn_input,
                preserves_residual=boundary.preserves_residual,
            ),
        )


PROVIDER = Provider()


def add_attention_candidate(result: tuple[Any, ...], plan: Any, *_: Any, **__: Any) -> Any:
    """After `attn_input_fusions`: our candidate first."""
    ours = PROVIDER.attn_input_fusions(plan)
    return (*ours, *result) if ours else None


def add_ffn_candidate(result: tuple[Any, ...], plan: Any) -> Any:
    """After `ffn_input_fusions`: our candidate first."""
    ours = PROVIDER.ffn_input_fusions(plan)
    return (*ours, *result) if ours else None


def register_provider() -> None:
    """Offer the candidates where SGLang has a registry for them, in front of its own kernels."""
    register: Any = lookup(REGISTRY.path)
    register("sm120", PROVIDER, priority=100)


REGISTRY = Seam(
    "sglang.srt.layers.layer_boundary.fusions.registry.register_allreduce_fusion",
    register_provider,
)

PART = Part(
    "fusion",
    (
        Binding(
            Target(
                "sglang.srt.layers.layer_boundary.fusions.allreduce.attn_input_fusions",
                "(plan, read=...)",
                "offers the fused sum of the FFN's output before each attention",
            ),
            HookType.AFTER,
            add_attention_candidate,
            REGISTRY,
        ),
        Binding(
            Target(
                "sglang.srt.layers.layer_boundary.fusions.allreduce.ffn_input_fusions",
                "(plan)",
                "offers the fused sum of the attention's output before each FFN",
            ),
            HookType.AFTER,
            add_ffn_candidate,
            REGISTRY,
        ),
    ),
)
