"""Weight prefetch in SGLang: each fused sum learns which weights are read after it.

A boundary of a layer is known by the norm that reads its sum: `post_attention_layernorm` after attention, and the
next layer's `input_layernorm` after the FFN. The ranges are read once, after the model's weights were loaded and
repacked and before graphs are captured; a captured call keeps its own.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_sm120.comm.communicator import Communicator, Op
from sglang_sm120.comm.plan import Plan
from sglang_sm120.hooks import session as sessions
from sglang_sm120.hooks.contract import Binding, Part, Target
from sglang_sm120.verify.prefetch import (
    CTAS,
    Limits,
    PrefetchError,
    PrefetchPlan,
    decoder_layers,
    plan_for,
)

logger = logging.getLogger("sglang_sm120")


class Prefetch:
    """What this process prefetches; nothing before `attach`."""

    def __init__(self) -> None:
        self.plan: PrefetchPlan | None = None
        self._chunks: torch.Tensor | None = None
        self._boundary: dict[int, int] = {}
        self._windows: dict[tuple[int, int], tuple[int, int]] = {}

    def attach(self, model: torch.nn.Module, limits: Limits, device: torch.device) -> None:
        """Plan for a loaded model.

        Raises:
            PrefetchError: the model has no decoder layers that the planner knows.
        """
        self.plan = plan_for(model, limits)
        self._boundary = boundary_of_norm(model, self.plan)
        self._chunks = self.plan.array().to(device)
        self._windows.clear()

    def before(self, norm: torch.nn.Module, communicator: Communicator, rows: int) -> None:
        """Ahead of the fused sum of `rows` rows that `norm` reads: hand over what is read after it."""
        boundary = self._boundary.get(id(norm))
        if boundary is None or self.plan is None:
            return
        window = self._windows.get((boundary, rows))
        if window is None:
            wait = expected_us(getattr(communicator, "plan", None), rows)
            window = self._windows[boundary, rows] = self.plan.window(boundary, wait)
        if window[1] and self._chunks is not None:
            communicator.prefetch_in_next(self._chunks, *window, CTAS)

    def sentence(self, plan: Plan | None) -> str:
        """One log line: how much is prefetched during a sum of the smallest and the largest planned batch."""
        assert self.plan is not None
        rows = (
            sorted({e.rows for e in plan.entries if e.op is Op.ALL_REDUCE_RMSNORM}) if plan else []
        )
        said = []
        for n in dict.fromkeys((rows[0], rows[-1]) if rows else ()):
            wait = expected_us(plan, n)
            most = max(self.plan.bytes_at(b, wait) for b in set(self._boundary.values()))
            said.append(f"up to {most / 2**20:.1f} MiB of {n} rows' {wait:.1f} us")
        return f"prefetch: weights after {len(self._boundary)} sums, {'; '.join(said) or 'no times known'}"


def boundary_of_norm(model: torch.nn.Module, plan: PrefetchPlan) -> dict[int, int]:
    """id of a norm module -> position in the plan of the boundary whose sum it reads."""
    layers: list[Any] = list(decoder_layers(model))
    found = {}
    for index, layer in enumerate(layers):
        after_attention = getattr(layer, "post_attention_layernorm", None)
        if after_attention is not None:
            found[id(after_attention)] = plan.index(index, "attention")
        if index > 0 and hasattr(layer, "input_layernorm"):
            found[id(layer.input_layernorm)] = plan.index(index - 1, "ffn")
    return found


def expected_us(plan: Plan | None, rows: int) -> float:
    """Microseconds of a fused sum as the plan measured it; 0 where it knows none, which prefetches nothing."""
    if plan is None:
        return 0.0
    choice = plan.lookup(Op.ALL_REDUCE_RMSNORM, rows)
    return choice.us if choice.source in ("timed", "between") else 0.0


def limits_of(gpu: Any, sharing: int = 1) -> Limits:
    """Limits of one rank: its part of a CUDA device's L2 and of its memory's peak (two transfers per clock of the bus).

    Args:
        gpu: `torch.cuda.get_device_properties()`: clock in kHz, bus in bits.
        sharing: ranks that compute on this GPU and prefetch at the same time.
    """
    peak = 2 * gpu.memory_clock_rate * gpu.memory_bus_width / 8 / 1000
    return Limits(gpu.L2_cache_size // sharing, peak / sharing)


PREFETCH = Prefetch()


def plan_weights(result: Any, self: Any) -> None:
    """After the workspaces are prepared: the target model's weights are where they stay."""
    runner = self.model_runner
    session = sessions.current()
    if runner.is_draft_worker or not session.adapters:
        return
    device = torch.cuda.current_device()
    shared = session.options.shared_gpu
    sharing = max(a.communicator.world for a in session.adapters) if shared else 1
    try:
        PREFETCH.attach(
            runner.model,
            limits_of(torch.cuda.get_device_properties(device), sharing),
            torch.device("cuda", device),
        )
    except PrefetchError as error:
        if session.tp_rank == 0:
            logger.info("sglang-sm120: no prefetch: %s", error)
        return
    if session.tp_rank == 0:
        plan = getattr(session.adapters[0].communicator, "plan", None)
        logger.info("sglang-sm120: %s", PREFETCH.sentence(plan))


PART = Part(
    "prefetch",
    (
        Binding(
            Target(
                "sglang.srt.model_executor.runner.base_runner.BaseRunner._pre_initialize_pcie_ipc_workspace",
                "(self)",
                "reads where the weights lie, once they are loaded",
            ),
            HookType.AFTER,
            plan_weights,
        ),
    ),
)
