"""What this process's hooks share: the options, the device, and the communicators they built."""

from __future__ import annotations

import atexit
import logging
from dataclasses import dataclass, field
from typing import NoReturn

from sglang_sm120 import __version__
from sglang_sm120.comm.factory import Outcome, Peer
from sglang_sm120.comm.peers import PeerWatch
from sglang_sm120.hooks.adapter import Sm120AllReduce
from sglang_sm120.hooks.contract import sglang_version
from sglang_sm120.options import Options, to_dict

logger = logging.getLogger("sglang_sm120")


@dataclass
class Session:
    """State of the plugin in one scheduler process.

    Attributes:
        device: "cuda" or "cpu", as SGLang resolved it.
        tp_rank: this process's tensor-parallel rank, for log lines and metrics.
        adapters: what SGLang holds as `ca_comm`, one per group served by us.
        outcomes: group name -> what the group decided at start.
        widest_bytes: (activations, logits) in bytes of the widest batch that graphs are captured for, where it is known.
    """

    options: Options
    device: str
    tp_rank: int
    adapters: list[Sm120AllReduce] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    widest_bytes: tuple[int, int] | None = None
    _watches: list[PeerWatch] = field(default_factory=list)

    def announce(self) -> None:
        """Say once, on one rank, what was asked for. (SGLang sets up logging only after phase 2.)"""
        if self.tp_rank == 0 and not self.outcomes:
            defaults = to_dict(Options())
            changed = {k: v for k, v in to_dict(self.options).items() if v != defaults[k]}
            logger.info("sglang-sm120 %s on SGLang %s: %s", __version__, sglang_version(), changed)

    def adopt(self, name: str, outcome: Outcome, adapter: Sm120AllReduce) -> None:
        """Keep a group's adapter and watch its ranks' processes."""
        self.adapters.append(adapter)

        def died(peer: Peer) -> None:
            logger.critical(
                'sglang-sm120: rank %d of group "%s" (process %d) has died; rank %d had finished %d calls. '
                "The server ends.",
                peer.rank,
                name,
                peer.pid,
                adapter.communicator.rank,
                adapter.communicator.calls.total(),
            )

        rank = adapter.communicator.rank
        try:
            self._watches.append(PeerWatch(outcome.session, rank, outcome.peers, died))
        except OSError as error:  # the watch only speaks sooner than a collective's bound does
            logger.warning(
                'sglang-sm120: rank %d of group "%s" does not watch the other ranks\' processes: %s',
                rank,
                name,
                error,
            )

    def serving(self) -> None:
        """End of warm-up: from here on a missing rank is an error after the short bound."""
        for adapter in self.adapters:
            adapter.communicator.set_timeout_ms(self.options.timeout_ms)

    def poll(self) -> None:
        """Raise what asynchronous collectives reported.

        Raises:
            CollectiveError: a rank was missing.
        """
        for adapter in self.adapters:
            adapter.poll()

    def explain(self) -> None:
        """Name the ranks whose processes have ended, after an error that may come of it."""
        for watch in self._watches:
            watch.report_deaths()

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        for adapter in self.adapters:
            communicator = adapter.communicator
            try:
                communicator.close()  # SGLang's own, inside the adapter, is SGLang's to close
            except RuntimeError as error:
                # At exit after a CUDA error: every call fails, and the driver frees all memory anyway.
                logger.debug("sglang-sm120: group %s not closed: %s", communicator.name, error)


_session: Session | None = None


def start(options: Options, device: str, tp_rank: int) -> Session:
    """Begin this process's session; a second call returns the first one's."""
    global _session
    if _session is None:
        _session = Session(options, device, tp_rank)
        atexit.register(_session.close)
    return _session


def current() -> Session:
    """The running session.

    Raises:
        RuntimeError: no hook of phase 2 was installed in this process.
    """
    if _session is None:
        raise RuntimeError("sglang-sm120 is not active in this process")
    return _session


def refuse(sentence: str) -> NoReturn:
    """End this scheduler process with one sentence; its launcher then ends the server.

    SystemExit, because SGLang turns any `Exception` of a custom all-reduce's set-up into a warning.
    """
    logger.critical("sglang-sm120: %s", sentence)
    raise SystemExit(1)
