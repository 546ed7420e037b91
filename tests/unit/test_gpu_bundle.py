"""Dropping other architectures' GPU code from a library, on fat binaries made by hand."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "gpu_bundle"))
import fatbin


def entry(kind: int, architecture: int, payload: bytes, header: int = 64) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, header, len(payload)).ljust(28, b"\x01")
    return (head + struct.pack("<I", architecture)).ljust(header, b"\x02") + payload


def library(*parts: bytes) -> bytearray:
    body = b"".join(parts)
    return bytearray(
        b"ELF..." + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body + b"...tail"
    )


def test_only_the_wanted_machine_code_keeps_its_bytes_and_every_offset_stays() -> None:
    old, new, text = b"a" * 40, b"b" * 24, b"c" * 8
    data = library(
        entry(fatbin.MACHINE_CODE, 80, old), entry(fatbin.MACHINE_CODE, 90, new), entry(fatbin.PTX, 90, text)
    )  # fmt: skip
    before = bytes(data)
    assert [(e.kind, e.architecture, e.length) for e in fatbin.entries(data)] == [
        (2, 80, 40), (2, 90, 24), (1, 90, 8),
    ]  # fmt: skip
    assert fatbin.keep_only(data, 90) == len(old) + len(text)
    assert len(data) == len(before)
    assert data.count(b"a") == before.count(b"a") - 40 and new in data and text not in data
    assert data == before.replace(old, bytes(40)).replace(text, bytes(8))


def test_a_library_without_the_architecture_is_refused_and_left_alone() -> None:
    data = library(entry(fatbin.MACHINE_CODE, 80, b"a" * 8))
    before = bytes(data)
    with pytest.raises(ValueError, match=r"no machine code for sm_90; the library has \[80\]"):
        fatbin.keep_only(data, 90)
    assert data == before


@pytest.mark.parametrize(
    "data",
    [
        b"nothing here",
        struct.pack("<IHHQ", 0xBA55ED50, 2, 16, 8) + bytes(8),  # another version
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 40),  # longer than the file
        struct.pack("<I", 0xBA55ED50),  # cut off
    ],
)
def test_what_is_no_fat_binary_is_passed_over(data: bytes) -> None:
    changed = bytearray(data)
    assert fatbin.keep_only(changed, 90) == 0 and changed == data
