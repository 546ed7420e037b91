"""Get every rank's slab mapped into every rank, or fail on all ranks alike.

A slab is memory of its own, never part of torch's pool: user tensors are never exported, so the allocator's
settings (`expandable_segments` for one) cannot break the exchange. Each way of sharing is tried by all ranks
together; if one rank fails, all undo that way and try the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Exchange = Callable[[Any], list[Any]]  # all-gather of a picklable object, in rank order

PEER_WAYS = ("vmm", "ipc")  # device memory: a file descriptor over a socket, or a CUDA IPC handle
HOST_WAYS = ("host",)  # pinned host memory that all processes map: mailboxes

_SOCKET_TIMEOUT_S = 20.0


class SlabError(RuntimeError):
    """No way of sharing slabs works for all ranks; the text lists each way, the rank that failed and why."""


@dataclass
class Slabs:
    """All ranks' slabs as mapped by this rank.

    Attributes:
        addresses: device addresses, in rank order; 0 where a rank is not mapped.
        nbytes: size of each.
        way: how they are shared.
    """

    addresses: list[int]
    nbytes: int
    way: str
    _undo: list[Callable[[], None]] = field(repr=False, default_factory=list)

    def close(self) -> None:
        """Unmap and free; needs no other rank, may be called twice, ignores a context that is gone."""
        while self._undo:
            with contextlib.suppress(Exception):
                self._undo.pop()()


def share(
    library: Any,
    exchange: Exchange,
    rank: int,
    world: int,
    nbytes: int,
    *,
    ways: Sequence[str] = PEER_WAYS,
    numa_node: int = -1,
) -> Slabs:
    """Allocate this rank's slab and map everyone's. Collective over `exchange`.

    Args:
        library: the CUDA library (`sglang_sm120.comm._lib.load("sglang_sm120_cuda")`).
        exchange: all-gather of a Python object over the group.
        nbytes: size of a slab; rounded up to the allocation granularity.
        ways: tried in order.
        numa_node: node for pinned host memory, -1 for any.

    Raises:
        SlabError: on every rank, if no way works on all of them.
    """
    complaints: list[str] = []
    for way in ways:
        slabs = Slabs([0] * world, nbytes, way)
        try:
            failed = _share_by(way, library, exchange, rank, slabs, numa_node)
        except (
            BaseException
        ):  # the exchange ended, because a rank did: files and sockets have names
            slabs.close()
            raise
        if not failed:
            return slabs
        slabs.close()
        complaints.append(f"{way}: " + "; ".join(failed))
    raise SlabError("slabs cannot be shared (" + " | ".join(complaints) + ")")


def _share_by(
    way: str, library: Any, exchange: Exchange, rank: int, slabs: Slabs, numa_node: int
) -> list[str]:
    """Share in one way; what failed, by rank, the same on every rank."""
    error: str | None = None
    try:
        offer = _OFFERS[way](library, slabs, rank, numa_node)
    except Exception as problem:
        offer, error = None, _first_line(problem)
    told = exchange((error, offer))
    failed = [f"rank {r}: {text}" for r, (text, _) in enumerate(told) if text is not None]
    if failed:
        return failed
    try:
        _ACCEPTS[way](library, slabs, rank, [entry[1] for entry in told], exchange)
    except Exception as problem:
        error = _first_line(problem)
    return [f"rank {r}: {text}" for r, text in enumerate(exchange(error)) if text is not None]


def _first_line(problem: Exception) -> str:
    lines = [line for line in str(problem).strip().splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[-1] if lines else 'no text'}"


# --- device memory as a file descriptor --------------------------------------------------------------


def _offer_vmm(library: Any, slabs: Slabs, rank: int, numa_node: int) -> str:
    unit = library.slab_vmm_granularity()
    slabs.nbytes = (slabs.nbytes + unit - 1) // unit * unit
    address, fd = library.slab_vmm_allocate(slabs.nbytes)
    nbytes = slabs.nbytes
    slabs._undo.append(lambda: library.slab_vmm_release(address, nbytes))
    slabs.addresses[rank] = address
    folder = tempfile.mkdtemp(prefix="sglang-sm120-")
    path = os.path.join(folder, "slab")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    _PENDING[id(slabs)] = (fd, listener)

    def forget() -> None:
        fd_, listener_ = _PENDING.pop(id(slabs), (-1, None))
        if listener_ is not None:
            listener_.close()
            os.close(fd_)
        Path(path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.rmdir(folder)

    slabs._undo.append(forget)
    return path


_PENDING: dict[int, tuple[int, socket.socket | None]] = {}


def _accept_vmm(
    library: Any, slabs: Slabs, rank: int, offers: list[Any], exchange: Exchange
) -> None:
    fd, listener = _PENDING[id(slabs)]
    assert listener is not None
    for peer, path in enumerate(offers):
        if peer == rank:
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as out:
            out.settimeout(_SOCKET_TIMEOUT_S)
            out.connect(path)
            socket.send_fds(out, [rank.to_bytes(2, "little")], [fd])
    listener.settimeout(_SOCKET_TIMEOUT_S)
    nbytes = slabs.nbytes
    for _ in range(len(offers) - 1):
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_SOCKET_TIMEOUT_S)
            message, fds, _, _ = socket.recv_fds(connection, 2, 1)
        try:
            address = library.slab_vmm_map(fds[0], nbytes)
        finally:
            for received in fds:
                os.close(received)
        slabs.addresses[int.from_bytes(message, "little")] = address
        slabs._undo.append(lambda a=address: library.slab_vmm_release(a, nbytes))  # type: ignore[misc]
    # The listener has done its work; the exchange after this step tells the peers so.
    slabs._undo.pop(1)()


# --- device memory as a CUDA IPC handle ---------------------------------------------------------------


def _offer_ipc(library: Any, slabs: Slabs, rank: int, numa_node: int) -> bytes:
    address = library.slab_ipc_allocate(slabs.nbytes)
    slabs._undo.append(lambda: library.slab_ipc_release(address))
    slabs.addresses[rank] = address
    return bytes(library.slab_ipc_handle(address))


def _accept_ipc(
    library: Any, slabs: Slabs, rank: int, offers: list[Any], exchange: Exchange
) -> None:
    for peer, handle in enumerate(offers):
        if peer == rank:
            continue
        address = library.slab_ipc_map(handle)
        slabs.addresses[peer] = address
        slabs._undo.append(lambda a=address: library.slab_ipc_unmap(a))  # type: ignore[misc]


# --- pinned host memory --------------------------------------------------------------------------------


def _offer_host(library: Any, slabs: Slabs, rank: int, numa_node: int) -> str:
    slabs.nbytes = (slabs.nbytes + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
    fd, path = tempfile.mkstemp(prefix="sglang-sm120-", dir="/dev/shm")
    slabs._undo.append(lambda: Path(path).unlink(missing_ok=True))
    os.ftruncate(fd, slabs.nbytes)
    _map_host(library, slabs, rank, rank, fd, numa_node)
    return path


def _accept_host(
    library: Any, slabs: Slabs, rank: int, offers: list[Any], exchange: Exchange
) -> None:
    errors: list[str] = []
    for peer, path in enumerate(offers):
        if peer == rank:
            continue
        try:
            _map_host(library, slabs, rank, peer, os.open(path, os.O_RDWR), -1)
        except Exception as problem:
            errors.append(_first_line(problem))
    exchange(
        None
    )  # every rank has opened every file: the names can go, so that no crash leaves one
    slabs._undo.pop(0)()
    if errors:
        raise RuntimeError("; ".join(errors))


def _map_host(library: Any, slabs: Slabs, rank: int, peer: int, fd: int, numa_node: int) -> None:
    try:
        memory = mmap.mmap(fd, slabs.nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if numa_node >= 0:
            _bind(address, slabs.nbytes, numa_node)
        if peer == rank:
            # Where /dev/shm is small, as in containers, this says so; the driver would only name an invalid argument.
            os.posix_fallocate(fd, 0, slabs.nbytes)
    finally:
        os.close(fd)
    slabs.addresses[peer] = library.slab_host_register(address, slabs.nbytes)
    # The mapping must outlive the registration; a later close releases it with the process.
    slabs._undo.append(lambda: (library.slab_host_unregister(address), memory)[0])


def _bind(address: int, nbytes: int, node: int) -> None:
    """Prefer `node` for pages that are not there yet (mbind, MPOL_PREFERRED); best effort."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return
    mask = ctypes.c_ulong(1 << node)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(
        237, ctypes.c_void_p(address), ctypes.c_ulong(nbytes), 1, ctypes.byref(mask), 64, 0
    )


_OFFERS: dict[str, Callable[[Any, Slabs, int, int], Any]] = {
    "vmm": _offer_vmm,
    "ipc": _offer_ipc,
    "host": _offer_host,
}
_ACCEPTS: dict[str, Callable[[Any, Slabs, int, list[Any], Exchange], None]] = {
    "vmm": _accept_vmm,
    "ipc": _accept_ipc,
    "host": _accept_host,
}
