"""Drop the GPU code of other architectures from a shared library: zeros pack to nothing, and every offset stays.

A fat binary in a library is a header (magic 0xBA55ED50, version 1, 16 bytes, then the length of what follows) and a
chain of entries: kind (1 PTX, 2 machine code), header length, payload length, and at byte 28 the architecture.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<IHHQ")  # magic, version, header length, length of the entries
ENTRY = struct.Struct("<HHIQ")  # kind, version, header length, payload length
ARCHITECTURE = 28
PTX, MACHINE_CODE = 1, 2


@dataclass(frozen=True)
class Entry:
    """One piece of GPU code: where its payload lies, and for which architecture (90 for sm_90) it is."""

    kind: int
    architecture: int
    start: int
    length: int


def entries(data: bytes | bytearray) -> Iterator[Entry]:
    """Every entry of every fat binary in `data`; what does not parse as one is passed over."""
    at = data.find(MAGIC)
    while at >= 0:
        following = at + len(MAGIC)
        if at + HEADER.size <= len(data):
            _, version, header, length = HEADER.unpack_from(data, at)
            if (version, header) == (1, HEADER.size) and at + header + length <= len(data):
                yield from _chain(data, at + header, at + header + length)
                following = at + header + length
        at = data.find(MAGIC, following)


def _chain(data: bytes | bytearray, at: int, end: int) -> Iterator[Entry]:
    while at + ARCHITECTURE + 4 <= end:
        kind, _, header, length = ENTRY.unpack_from(data, at)
        if kind not in (PTX, MACHINE_CODE) or not ARCHITECTURE + 4 <= header <= 4096:
            return
        if at + header + length > end:
            return
        (architecture,) = struct.unpack_from("<I", data, at + ARCHITECTURE)
        yield Entry(kind, architecture, at + header, length)
        at += header + length


def keep_only(data: bytearray, architecture: int) -> int:
    """Blank all GPU code but machine code for `architecture`, in place; the number of bytes blanked.

    Raises:
        ValueError: there is GPU code, but none for that architecture.
    """
    found = list(entries(data))
    kept = [e for e in found if (e.kind, e.architecture) == (MACHINE_CODE, architecture)]
    if found and not kept:
        held = sorted({e.architecture for e in found})
        raise ValueError(f"no machine code for sm_{architecture}; the library has {held}")
    gone = 0
    for e in found:
        if e not in kept:
            data[e.start : e.start + e.length] = bytes(e.length)
            gone += e.length
    return gone
