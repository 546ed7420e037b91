"""Put a backend's communicator behind a plan: what a hook calls once per group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from sglang_sm120.comm import plan_cache, warmup
from sglang_sm120.comm.candidates import Baseline, candidates_of, operations
from sglang_sm120.comm.communicator import CollectiveError, Communicator
from sglang_sm120.comm.counters import CallCounters
from sglang_sm120.comm.dispatch import PlannedCommunicator
from sglang_sm120.comm.plan import Exchange, Plan
from sglang_sm120.comm.planner import Candidate, Request
from sglang_sm120.fabric import islands as isl
from sglang_sm120.fabric.driver import EdgeDriver, NoAccess
from sglang_sm120.fabric.verdict import Verdict, Veto, host_vetoes, user_vetoes, version_vetoes
from sglang_sm120.fabric.versions import Versions

logger = logging.getLogger(__name__)

# Makes a further backend's communicator; collective, None on every rank where one cannot (it says why in the log).
Extra = Callable[[], Communicator | None]
HOST_PROBE_BYTES = 256 << 10  # per pair of ranks: host memory gains nothing from more
SGLANGS_PCIE = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"  # SGLang's switch for FlashInfer's sums
DEFAULT_ROWS = 64  # widest planned row count where no captured ones are known


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
        fp8: plan the operation with the FP8 epilogue too. No layer of SGLang 0.5.23 calls it, and its baseline takes
            seconds to compile at first use, so servers leave it out.
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
    fp8: bool = False


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
    extras: Mapping[str, Extra] | None = None,
) -> PlannedCommunicator:
    """Put `inner`, the communicator of `backend`, behind a plan, so that it serves only what the plan gives it.

    The plan is made in `prepare`, which is collective; until then nothing is admitted, on every rank alike.

    Args:
        baseline: what SGLang does; without it, timed candidates have nothing to beat and the model stands in.
        driver: makes this rank's probe driver (collective), or None where there is nothing to probe.
        counters: where the plan and served calls are exported.
        extras: further backends by name, made only where the verdict lets them compete: mailboxes where the machine
            stops `backend`, FlashInfer where nothing stops it.
    """
    served: dict[str, Communicator] = {backend: inner}

    failed: set[str] = set()

    def ready(name: str, request: Request, dtype: torch.dtype) -> Communicator | None:
        """The communicator of a further backend with its buffers made; None, with a line in the log, where it fails."""
        found = served.get(name)
        if found is None and extras and name in extras and name not in failed:
            found = extras[name]()
        if found is None:
            failed.add(name)
            return None
        try:
            found.prepare(request.hidden, dtype, request.rows)
        except CollectiveError as error:  # on every rank alike
            logger.warning("SM120 %s is left out of group %s: %s", name, inner.name, error)
            found.close()
            served.pop(name, None)
            failed.add(name)
            return None
        served[name] = found
        return found

    def plan_for(hidden: int, dtype: torch.dtype, rows: Sequence[int]) -> Plan:
        request = Request(
            group=inner.name,
            world=inner.world,
            hidden=hidden,
            itemsize=dtype.itemsize,
            rows=tuple(sorted(set(rows))) or rows_up_to(DEFAULT_ROWS),
            ops=operations(served, setting.fp8),
            pin=setting.pin,
        )
        # Ranks may be started with their own variables; the baseline is rank 0's as much as anyone's.
        settings = exchange(baseline_environment(setting.environ))[0]
        identity = plan_cache.Identity(
            gpus=setting.gpus,
            versions=setting.versions,
            group=inner.name,
            world=inner.world,
            hidden=hidden,
            itemsize=dtype.itemsize,
            rows=request.rows,
            options=f"{setting.options} backend={backend} pin={setting.pin} islands={isl.text(setting.islands)} fp8={setting.fp8} "
            f"nccl={settings}",
            kernel=setting.kernel,
        )
        known = [
            *user_vetoes(setting.environ),
            *host_vetoes(setting.hosts),
            *version_vetoes(setting.versions.flashinfer),
        ]
        try:
            inner.prepare(hidden, dtype, request.rows)
        except CollectiveError as error:  # on every rank alike
            known.append(Veto(target=backend, reason=str(error), origin="start"))

        def candidates(islands: isl.Partition, verdict: Verdict) -> Sequence[Candidate]:
            for name in extras or {}:
                if competes(name, backend, verdict):
                    ready(name, request, dtype)
            return candidates_of(served, hidden, dtype, device, baseline)

        done = warmup.plan_group(
            request,
            rank=inner.rank,
            exchange=exchange,
            identity=identity,
            cache=setting.cache,
            driver=driver,
            candidates=candidates,
            known=known,
            force=setting.force,
            islands=setting.islands,
            sums=lambda name: inner if name == backend else ready(name, request, dtype),
            path=backend,
            device=str(device),
            dtype=dtype,
        )
        warmup.log_once(done, inner.rank, (backend,))
        if counters:
            verdict = Verdict(inner.name, inner.rank)
            verdict.add(done.vetoes)
            for veto in verdict.against(backend):
                counters.refuse(inner.name, backend, veto.origin)
        return done.plan

    return PlannedCommunicator(served, plan_for, counters)


def competes(name: str, primary: str, verdict: Verdict) -> bool:
    """Whether a further backend is worth making beside `primary`; a pure function of the agreed verdict."""
    if not verdict.allows(name):
        return False
    if name == "mailbox":
        # Slower than peer memory wherever that works; and a user who switched peer-to-peer off wants no kernels of ours.
        against = verdict.against(primary)
        return bool(against) and not any(veto.wish for veto in against)
    return True


def baseline_environment(environ: Mapping[str, str]) -> str:
    """The settings that the baseline was timed under, as sorted text; what only prints does not count."""
    told = {
        k: v
        for k, v in environ.items()
        if k == SGLANGS_PCIE or (k.startswith("NCCL_") and "DEBUG" not in k)
    }
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
        from sglang_sm120.comm.cuda_library import CudaLibraryMissing, cuda_library
        from sglang_sm120.fabric.gpu_driver import GpuDriver

        library, problem = None, ""
        try:
            library = cuda_library()
        except CudaLibraryMissing as missing:  # told together: the next step waits for every rank
            problem = str(missing)
        told = [f"rank {r}: {text}" for r, text in enumerate(exchange(problem)) if text]
        if told:
            raise NoAccess(f"the probe's kernels are missing ({'; '.join(told)})")
        index = device.index if device.index is not None else torch.cuda.current_device()
        ways = slab.HOST_WAYS if mailbox else slab.PEER_WAYS
        return GpuDriver.join(rank, world, exchange, library=library, device=index, ways=ways)

    return join


def host_edges(rank: int, world: int, exchange: Exchange, session: str) -> Callable[[], EdgeDriver]:
    """The `driver` of `planned` for CPU tensors: probe the host memory that the host engine works in."""

    def join() -> EdgeDriver:
        from sglang_sm120.fabric.host_driver import HostDriver

        return HostDriver.join(rank, world, session, exchange, capacity=HOST_PROBE_BYTES)

    return join


def rows_up_to(widest: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `widest` itself."""
    return tuple(
        sorted({1 << i for i in range(widest.bit_length()) if 1 << i <= widest} | {widest})
    )
