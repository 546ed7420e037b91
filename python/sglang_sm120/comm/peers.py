"""Say at once which rank died, even when no collective is waiting for it.

A collective's bounded wait names the missing rank only when it expires, and a server that is idle waits in no
collective at all. The kernel tells us earlier: a pidfd becomes readable when its process ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_sm120.comm.factory import Peer

# A launcher that stops its server kills all ranks within milliseconds; that is no death worth a line.
GRACE_S = 0.02
# A dying process closes its sockets before its pidfd says that it has ended: with a GPU's memory to free, seconds before.
ENDING_S = 1.0
LOOK_S = 0.01


class PeerWatch:
    """Watches the other ranks' processes from a daemon thread.

    A rank that leaves in order says so to the others in `close()`; a rank that ends without a word has died. The
    words travel over sockets in Linux's abstract namespace, of which nothing is left when a process ends.

    Args:
        session: text that is unique to this group on this machine.
        rank: this process's rank; it is not watched.
        peers: all ranks. Ranks on another machine or in another PID namespace are not watched.
        on_death: called once per dead rank, in the watching thread or in that of `report_deaths`.
    """

    def __init__(
        self, session: str, rank: int, peers: Sequence[Peer], on_death: Callable[[Peer], None]
    ) -> None:
        me = next(peer for peer in peers if peer.rank == rank)
        self._session, self._rank = session, rank
        self._ranks = [peer.rank for peer in peers]
        self._on_death = on_death
        self._left: set[int] = set()
        self._lock = threading.Lock()
        self._fds: dict[int, Peer] = {}
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._inbox.bind(address(session, rank))
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
        if self._thread.is_alive():
            say_goodbye(self._session, self._rank, self._ranks)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        poll = select.poll()
        for fd in (self._inbox.fileno(), *self._fds):
            poll.register(fd, select.POLLIN)
        while self._rank not in self._left:
            for fd, _ in poll.poll():
                if fd == self._inbox.fileno():
                    self._hear()
                    continue
                poll.unregister(fd)
                time.sleep(GRACE_S)
                self._ended(fd)
        with self._lock:
            for fd in self._fds:
                os.close(fd)
            self._fds.clear()
            self._inbox.close()

    def report_deaths(self, wait_s: float = ENDING_S) -> None:
        """Report now what the thread would report later; for a rank that has just failed and will end.

        Args:
            wait_s: how long to wait for the first process to end.
        """
        deadline = time.monotonic() + wait_s
        while self._fds:
            watched = dict(self._fds)
            ended: list[int] = []
            with contextlib.suppress(OSError, ValueError):  # the thread has just closed one
                ended = select.select(list(watched), [], [], LOOK_S)[0]
            ended += [fd for fd, peer in watched.items() if fd not in ended and ending(peer.pid)]
            for fd in ended:
                self._ended(fd)
            if ended or time.monotonic() > deadline:
                return

    def _ended(self, fd: int) -> None:
        with self._lock:
            peer = self._fds.pop(fd, None)
            if peer is None:
                return
            os.close(fd)
            self._hear()
            if peer.rank not in self._left:
                self._on_death(peer)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._left.update(self._inbox.recv(16))


def ending(pid: int) -> bool:
    """Whether a process has given up its memory, the first thing that an ending process does."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def address(session: str, rank: int) -> str:
    """Abstract socket address where a rank hears who leaves."""
    return f"\0sglang-sm120-{session}-{rank}"


def say_goodbye(session: str, rank: int, ranks: Sequence[int]) -> None:
    """Tell all ranks, this one's own watch included, that `rank` leaves in order."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
        for other in ranks:
            with contextlib.suppress(OSError):  # it left before us
                out.sendto(bytes([rank]), address(session, other))
