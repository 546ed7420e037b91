"""Say at once which rank died, even when no collective is waiting for it.

A collective's bounded wait names the missing rank only when it expires, and a server that is idle waits in no
collective at all. The kernel tells us earlier: a pidfd becomes readable when its process ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_sm120.comm.factory import Peer

# A launcher that stops its server kills all ranks within milliseconds; that is no death worth a line.
GRACE_S = 0.05


class PeerWatch:
    """Watches the other ranks' processes from a daemon thread.

    A rank that leaves in order calls `close()` (or ends its interpreter), which removes its mark; a rank that
    ends while its mark is there has died.

    Args:
        session: text that is unique to this group on this machine.
        rank: this process's rank; it is not watched.
        peers: all ranks. Ranks on another machine or in another PID namespace are not watched.
        on_death: called once per dead rank, in the watching thread.
    """

    def __init__(
        self, session: str, rank: int, peers: Sequence[Peer], on_death: Callable[[Peer], None]
    ) -> None:
        me = next(peer for peer in peers if peer.rank == rank)
        self._session = session
        self._mark = _mark(session, rank)
        self._mark.touch()
        self._on_death = on_death
        self._fds: dict[int, Peer] = {}
        self._wake, self._woken = os.pipe()
        for peer in peers:
            visible = (peer.machine, peer.pid_namespace) == (me.machine, me.pid_namespace)
            if peer.rank != rank and visible and me.pid_namespace:
                with contextlib.suppress(OSError):  # an old kernel, or the peer has gone already
                    self._fds[os.pidfd_open(peer.pid)] = peer
        self._thread = threading.Thread(target=self._watch, daemon=True, name="sm120-peer-watch")
        self._thread.start()

    @property
    def watched(self) -> tuple[int, ...]:
        """Ranks that are still watched."""
        return tuple(sorted(peer.rank for peer in self._fds.values()))

    def close(self) -> None:
        """Leave in order; may be called twice."""
        self._mark.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.close(self._woken)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        while self._fds:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    self._release()
                    return
                peer = self._fds.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                mark = _mark(self._session, peer.rank)
                if mark.exists():
                    time.sleep(GRACE_S)
                    mark.unlink(missing_ok=True)
                    self._on_death(peer)
        self._release()

    def _release(self) -> None:
        for fd in (*self._fds, self._wake):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds.clear()


def _mark(session: str, rank: int) -> Path:
    return Path(tempfile.gettempdir()) / f"sglang-sm120-{session}-{rank}.alive"
