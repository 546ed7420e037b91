"""What the host did while a server was measured: a rank whose process is slow makes every other rank wait in its sums."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil


class RankUse(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's process, in cores: seconds of processor time per second.

    Attributes:
        main: its main thread, which runs the model.
        others: all its other threads together.
        busiest: the busiest of the others.
        preempted: times per second that the main thread lost its core while it could run.
    """

    main: float
    others: float
    busiest: float
    preempted: float


class HostUse(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the ranks over one span of time.

    Attributes:
        busy: cores that worked, of `cores`.
        stolen: cores' worth of time that a hypervisor gave to others.
    """

    cores: int
    busy: float
    stolen: float
    ranks: tuple[RankUse, ...]


@dataclass(frozen=True)
class _Look:
    at: float
    busy: float
    stolen: float
    threads: tuple[dict[int, float], ...]  # per rank: thread -> seconds
    preempted: tuple[int, ...]


class HostWatch:
    """Measures from its creation to `use()`.

    Args:
        processes: one per rank; one that has ended counts as idle.
    """

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = list(processes)
        self._began = self._look()

    def use(self) -> HostUse:
        """The use since the creation."""
        old, new = self._began, self._look()
        span = max(new.at - old.at, 1e-9)
        ranks = []
        for i, process in enumerate(self._processes):
            spent = {t: s - old.threads[i].get(t, 0.0) for t, s in new.threads[i].items()}
            main = spent.pop(process.pid, 0.0)
            ranks.append(
                RankUse(
                    main=main / span,
                    others=sum(spent.values()) / span,
                    busiest=max(spent.values(), default=0.0) / span,
                    preempted=max(new.preempted[i] - old.preempted[i], 0) / span,
                )
            )
        return HostUse(
            cores=psutil.cpu_count() or 1,
            busy=(new.busy - old.busy) / span,
            stolen=(new.stolen - old.stolen) / span,
            ranks=tuple(ranks),
        )

    def _look(self) -> _Look:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        stolen = getattr(times, "steal", 0.0)
        # user and nice contain guest and guest_nice.
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return _Look(
            at=time.monotonic(),
            busy=sum(times) - idle - stolen - guests,
            stolen=stolen,
            threads=tuple(_threads(process) for process in self._processes),
            preempted=tuple(_preempted(process.pid) for process in self._processes),
        )


def _threads(process: psutil.Process) -> dict[int, float]:
    with contextlib.suppress(psutil.Error):
        return {t.id: t.user_time + t.system_time for t in process.threads()}
    return {}


def _preempted(pid: int) -> int:
    """Involuntary switches of a process's main thread so far."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines():
            if line.startswith("nonvoluntary_ctxt_switches:"):
                return int(line.split()[1])
    return 0
