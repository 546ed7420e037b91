"""Put a backend's communicator behind a plan: what a hook calls once per group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from sglang_sm120.comm import plan_cache, timing, warmup
from sglang_sm120.comm.communicator import Communicator, Op
from sglang_sm120.comm.counters import CallCounters
from sglang_sm120.comm.dispatch import PlannedCommunicator
from sglang_sm120.comm.plan import BASELINE, Exchange, Plan
from sglang_sm120.comm.planner import Candidate, Request, own_candidates
from sglang_sm120.fabric import islands as isl
from sglang_sm120.fabric.driver import EdgeDriver, NoAccess
from sglang_sm120.fabric.verdict import Verdict, Veto, host_vetoes, user_vetoes, version_vetoes
from sglang_sm120.fabric.versions import Versions

SHARING = "containers: --ipc=host and --cap-add SYS_PTRACE; GPUs: `sglang-sm120 doctor`"
EPS = 1e-6  # of the timed RMSNorm; its value does not change the time


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What a group's plan depends on besides the communicator; equal on every rank but for `environ`.

    Attributes:
        gpus: identity of each rank's GPU (UUID), or of its CPU, in rank order.
        hosts: identity of each rank's machine (boot id), in rank order.
        versions: of this installation.
        islands: the partition that the communicator was built with.
        options: settings that change candidates, as text.
        pin: the backend that the user asked for, "" for auto.
        force: the user asked for the custom path although he switched peer-to-peer off.
        environ: the process's environment (the user's NCCL switches).
        cache: folder of kept plans, None for none.
        kernel: release of the running kernel.
        rows: captured row counts; when empty, powers of two up to the widest.
    """

    gpus: tuple[str, ...]
    hosts: tuple[str, ...]
    versions: Versions
    islands: isl.Partition
    options: str = ""
    pin: str = ""
    force: bool = False
    environ: Mapping[str, str] = {}
    cache: Path | None = None
    kernel: str = ""
    rows: tuple[int, ...] = ()


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> object:
    """Residual add in place and RMSNorm by torch, where the caller knows no faster way."""
    torch.add(x, residual, out=residual)
    return torch.nn.functional.rms_norm(residual, (x.shape[-1],), weight, eps)


@dataclass(frozen=True)
class Baseline:
    """What SGLang does without this plugin.

    Attributes:
        sum: sums a tensor over the group, in place or not.
        capture: entered around the capture of a CUDA graph that holds such sums.
        add_norm: (x, residual, weight, eps): what follows a sum where the operation has a norm.
    """

    sum: Callable[[torch.Tensor], object]
    capture: timing.Capture = nullcontext
    add_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], object] = add_norm


def planned(
    inner: Communicator,
    backend: str,
    setting: Setting,
    *,
    device: torch.device,
    exchange: Exchange,
    baseline: Baseline | None = None,
    driver: Callable[[], EdgeDriver | None] = lambda: None,
    counters: CallCounters | None = None,
) -> PlannedCommunicator:
    """Wrap `inner`, the communicator of `backend`, so that it serves only what its plan gives it.

    The plan is made in `prepare`, which is collective; until then nothing is admitted, on every rank alike.

    Args:
        baseline: what SGLang does; without it, timed candidates have nothing to beat and the
            model stands in.
        driver: makes this rank's probe driver (collective), or None where there is nothing to probe.
        counters: where the plan and served calls are exported.
    """

    def plan_for(hidden: int, dtype: torch.dtype, max_rows: int | None) -> Plan:
        rows = tuple(r for r in setting.rows if max_rows is None or r <= max_rows)
        request = Request(
            group=inner.name,
            world=inner.world,
            hidden=hidden,
            itemsize=dtype.itemsize,
            rows=rows or rows_up_to(max_rows or 64),
            pin=setting.pin,
        )
        # Ranks may be started with their own variables; the baseline is rank 0's as much as anyone's.
        settings = exchange(nccl_environment(setting.environ))[0]
        identity = plan_cache.Identity(
            gpus=setting.gpus,
            versions=setting.versions,
            group=inner.name,
            world=inner.world,
            hidden=hidden,
            itemsize=dtype.itemsize,
            rows=request.rows,
            options=f"{setting.options} backend={backend} islands={isl.text(setting.islands)} "
            f"nccl={settings}",
            kernel=setting.kernel,
        )

        def candidates(islands: isl.Partition, verdict: Verdict) -> Sequence[Candidate]:
            return candidates_of(inner, backend, request, islands, dtype, device, baseline)

        known = [
            *user_vetoes(setting.environ),
            *host_vetoes(setting.hosts),
            *version_vetoes(setting.versions.flashinfer),
        ]
        try:
            edges = driver()
        except NoAccess as error:  # on every rank alike
            edges = None
            known.append(Veto(target=backend, reason=str(error), remedy=SHARING, origin="exchange"))
        done = warmup.plan_group(
            request,
            rank=inner.rank,
            exchange=exchange,
            identity=identity,
            cache=setting.cache,
            driver=edges,
            candidates=candidates,
            known=known,
            force=setting.force,
            islands=setting.islands,
            sums=lambda _: inner,
            path=backend,
            device=str(device),
        )
        warmup.log_once(done, inner.rank, (backend,))
        if counters:
            verdict = Verdict(inner.name, inner.rank)
            verdict.add(done.vetoes)
            for veto in verdict.against(backend):
                counters.refuse(inner.name, backend, veto.origin)
        return done.plan

    return PlannedCommunicator(inner, backend, plan_for, counters, choose=partial(_choose, inner))


def nccl_environment(environ: Mapping[str, str]) -> str:
    """The NCCL settings that the baseline was timed under, as sorted text; what only prints does not count."""
    told = {k: v for k, v in environ.items() if k.startswith("NCCL_") and "DEBUG" not in k}
    return " ".join(f"{k}={v}" for k, v in sorted(told.items()))


def gpu_edges(
    rank: int, world: int, exchange: Exchange, device: torch.device, *, mailbox: bool = False
) -> Callable[[], EdgeDriver]:
    """The `driver` of `planned` for GPUs: the probe's kernels over memory of its own, freed after the probe.

    Args:
        mailbox: probe pinned host memory, as the mailbox backend uses it, rather than peers' memory.
    """

    def join() -> EdgeDriver:
        from sglang_sm120.comm import slab
        from sglang_sm120.comm.cuda_library import cuda_library
        from sglang_sm120.fabric.gpu_driver import GpuDriver

        index = device.index if device.index is not None else torch.cuda.current_device()
        ways = slab.HOST_WAYS if mailbox else slab.PEER_WAYS
        return GpuDriver.join(
            rank, world, exchange, library=cuda_library(), device=index, ways=ways
        )

    return join


def rows_up_to(widest: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `widest` itself."""
    return tuple(
        sorted({1 << i for i in range(widest.bit_length()) if 1 << i <= widest} | {widest})
    )


def candidates_of(
    inner: Communicator,
    backend: str,
    request: Request,
    islands: isl.Partition,
    dtype: torch.dtype,
    device: torch.device,
    baseline: Baseline | None,
) -> list[Candidate]:
    """The backend's schedules (where it lets the plan choose) and the baseline, each with its timing."""

    def call_of(op: Op, rows: int) -> Callable[[], object]:
        x, residual, weight = timing.inputs(rows, request.hidden, dtype, device)
        if op is Op.ALL_REDUCE:
            return lambda: inner.all_reduce(x)
        return lambda: inner.all_reduce_rmsnorm(x, residual, weight, EPS)

    def with_schedule(schedule: str) -> Callable[[Op, int], float]:
        def timed(op: Op, rows: int) -> float:
            _choose(inner, op, rows, schedule)
            try:
                if not inner.admits(op, rows, request.hidden, dtype):
                    return float("inf")
                return timing.call_us(call_of(op, rows), device)
            finally:
                _choose(inner, op, rows, "")

        return timed

    if hasattr(inner, "pin"):
        out = own_candidates(
            request, islands, backend, lambda schedule, ctas: with_schedule(schedule), ctas=(0,)
        )
    else:
        out = [Candidate(backend, time=lambda op, rows: timing.call_us(call_of(op, rows), device))]
    if baseline is not None:
        out.append(
            Candidate(BASELINE, time=_baseline_timer(baseline, request.hidden, dtype, device))
        )
    return out


def _baseline_timer(
    baseline: Baseline, hidden: int, dtype: torch.dtype, device: torch.device
) -> Callable[[Op, int], float]:
    """SGLang's own path: the sum, and where the op has one, residual add and RMSNorm as separate kernels."""

    def timed(op: Op, rows: int) -> float:
        x, residual, weight = timing.inputs(rows, hidden, dtype, device)

        def unfused() -> object:
            baseline.sum(x)
            return baseline.add_norm(x, residual, weight, EPS)

        call = (lambda: baseline.sum(x)) if op is Op.ALL_REDUCE else unfused
        return timing.call_us(call, device, baseline.capture)

    return timed


def _choose(inner: Any, op: Op, rows: int, schedule: str) -> None:
    """Let calls of `rows` rows run by `schedule` ("" is the backend's own choice), where it can be told."""
    if hasattr(inner, "pin"):
        from sglang_sm120.comm.native import How

        inner.pin(op, rows, How(schedule) if schedule else None)
