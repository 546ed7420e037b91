"""The candidates of a plan, each with the call that is timed: our backends' ways to run, and what SGLang does itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from sglang_sm120.comm import timing
from sglang_sm120.comm.communicator import Communicator, Op
from sglang_sm120.comm.plan import BASELINE
from sglang_sm120.comm.planner import Candidate

EPS = 1e-6  # of the timed RMSNorm; its value does not change the time
E4M3_MAX = 448.0


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Residual add in place and RMSNorm by torch, where the caller knows no faster way."""
    torch.add(x, residual, out=residual)
    return torch.nn.functional.rms_norm(residual, (x.shape[-1],), weight, eps)


def quantise(x: torch.Tensor) -> object:
    """Per-token FP8 E4M3 by torch."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


@dataclass(frozen=True)
class Baseline:
    """What SGLang does without this plugin.

    Attributes:
        sum: sums a tensor over the group, in place or not.
        capture: entered around the capture of a CUDA graph that holds such sums.
        add_norm: (x, residual, weight, eps) -> normed: what follows a sum where the operation has a norm.
    """

    sum: Callable[[torch.Tensor], object]
    capture: timing.Capture = nullcontext
    add_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], object] = add_norm


def operations(served: Mapping[str, Communicator], fp8: bool = True) -> tuple[Op, ...]:
    """The operations worth planning: with `fp8` also the FP8 epilogue, where a backend has one."""
    fp8 = fp8 and any(hasattr(inner, "all_reduce_rmsnorm_fp8") for inner in served.values())
    return (Op.ALL_REDUCE, Op.ALL_REDUCE_RMSNORM, *([Op.ALL_REDUCE_RMSNORM_FP8] if fp8 else []))


def candidates_of(
    served: Mapping[str, Communicator],
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    baseline: Baseline | None,
) -> list[Candidate]:
    """Every way of every backend, and the baseline, each with its timing; the same list on every rank."""
    out: list[Candidate] = []
    for backend, inner in served.items():
        ways = dict.fromkeys(way for op in operations({backend: inner}) for way in inner.ways(op))
        out += [
            Candidate(backend, schedule, ctas, _timer(inner, schedule, ctas, hidden, dtype, device))
            for schedule, ctas in ways
        ]
    if baseline is not None:
        out.append(Candidate(BASELINE, time=_baseline_timer(baseline, hidden, dtype, device)))
    return out


def _timer(
    inner: Communicator,
    schedule: str,
    ctas: int,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[Op, int], float]:
    def timed(op: Op, rows: int) -> float:
        if (schedule, ctas) not in inner.ways(op):
            return math.inf
        inner.choose(op, rows, hidden, schedule, ctas)
        try:
            if not inner.admits(op, rows, hidden, dtype):
                return math.inf
            us = timing.call_us(_call(inner, op, rows, hidden, dtype, device), device)
            inner.poll()  # replays of a graph raise nothing: a failed one ends early and looks fast
            return us
        finally:
            inner.choose(op, rows, hidden, "")

    return timed


def _call(
    inner: Communicator,
    op: Op,
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], object]:
    x, residual, weight = timing.inputs(rows, hidden, dtype, device)
    if op is Op.ALL_REDUCE:
        return lambda: inner.all_reduce(x)
    if op is Op.ALL_REDUCE_RMSNORM:
        return lambda: inner.all_reduce_rmsnorm(x, residual, weight, EPS)
    fused = getattr(inner, "all_reduce_rmsnorm_fp8", None)
    if fused is None:
        raise NotImplementedError(f"{type(inner).__name__} has no FP8 epilogue")
    return lambda: fused(x, residual, weight, EPS)


def _baseline_timer(
    baseline: Baseline, hidden: int, dtype: torch.dtype, device: torch.device
) -> Callable[[Op, int], float]:
    """SGLang's own path: the sum, and where the op has more, residual add + RMSNorm and FP8 as separate kernels."""

    def timed(op: Op, rows: int) -> float:
        x, residual, weight = timing.inputs(rows, hidden, dtype, device)

        def call() -> None:
            baseline.sum(x)
            if op is not Op.ALL_REDUCE:
                baseline.add_norm(x, residual, weight, EPS)
            if op is Op.ALL_REDUCE_RMSNORM_FP8:
                quantise(x)

        return timing.call_us(call, device, baseline.capture)

    return timed
