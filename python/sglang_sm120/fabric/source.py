"""Where topology facts come from: this machine, or a folder saved on another one.

A saved folder holds `sysfs.json` (every file, link and listing of /sys and /proc that discovery read), `nvml.json`
(the driver's answers) and `meta.json`. It is what a user sends for support, and what tests read.
"""

from __future__ import annotations

import json
import os
import platform
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final

from sglang_sm120.fabric.nvml import read_nvml

FORMAT: Final = 1
READ_LIMIT: Final = 64 * 1024


class SourceError(RuntimeError):
    """A saved folder cannot be read; the text names the file."""


class Source(ABC):
    """Read access to one machine."""

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Content of a file below /sys or /proc, or None when it is missing or unreadable."""

    @abstractmethod
    def link(self, path: str) -> str | None:
        """Where a symbolic link leads, as an absolute path, or None."""

    @abstractmethod
    def names(self, path: str) -> list[str]:
        """Sorted names in a folder; empty when it is missing."""

    @abstractmethod
    def nvml(self) -> dict[str, Any]:
        """The driver's answers, see `read_nvml`; {"error": text} when there is no driver."""

    @abstractmethod
    def root(self) -> bool:
        """Whether the facts were read with root's rights (PCI configuration beyond 64 bytes)."""

    def text(self, path: str) -> str:
        """Stripped text of a file; "" when it is missing."""
        data = self.read(path)
        return data.decode(errors="replace").strip() if data else ""

    def number(self, path: str, default: int = -1) -> int:
        """A file's integer ("8", "0x10de"); `default` when there is none."""
        try:
            return int(self.text(path), 0)
        except ValueError:
            return default


class Live(Source):
    """This machine. Needs no root; what root would add is missing."""

    def read(self, path: str) -> bytes | None:
        try:
            with open(path, "rb") as file:
                return file.read(READ_LIMIT)
        except OSError:
            return None

    def link(self, path: str) -> str | None:
        return os.path.realpath(path) if os.path.islink(path) else None

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def nvml(self) -> dict[str, Any]:
        return read_nvml()

    def root(self) -> bool:
        return os.geteuid() == 0


class Saved(Source):
    """A folder written by `Recording.save`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        tree = self._load("sysfs.json")
        self._files: dict[str, Any] = tree["files"]
        self._links: dict[str, str] = tree["links"]
        self._dirs: dict[str, list[str]] = tree["dirs"]
        self._nvml: dict[str, Any] = self._load("nvml.json")
        self.meta: dict[str, Any] = self._load("meta.json")
        if self.meta.get("format") != FORMAT:
            raise SourceError(
                f"{self.folder / 'meta.json'}: format {self.meta.get('format')}; this release reads {FORMAT}"
            )

    def _load(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            loaded = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise SourceError(
                f"{path} cannot be read ({error}): not a folder saved by doctor --save"
            ) from error
        return loaded

    def read(self, path: str) -> bytes | None:
        stored = self._files.get(path)
        return None if stored is None else _decode(stored)

    def link(self, path: str) -> str | None:
        return self._links.get(path)

    def names(self, path: str) -> list[str]:
        return list(self._dirs.get(path, []))

    def nvml(self) -> dict[str, Any]:
        return self._nvml

    def root(self) -> bool:
        return bool(self.meta.get("root"))


class Recording(Source):
    """Passes through to another source and remembers all that was read, so that it can be saved."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner
        self._files: dict[str, Any] = {}
        self._links: dict[str, str] = {}
        self._dirs: dict[str, list[str]] = {}
        self._nvml: dict[str, Any] = {}

    def read(self, path: str) -> bytes | None:
        data = self.inner.read(path)
        if data is not None:
            self._files[path] = _encode(_brief(data) if path == "/proc/cpuinfo" else data)
        return data

    def link(self, path: str) -> str | None:
        target = self.inner.link(path)
        if target is not None:
            self._links[path] = target
        return target

    def names(self, path: str) -> list[str]:
        found = self.inner.names(path)
        if found:
            self._dirs[path] = found
        return found

    def nvml(self) -> dict[str, Any]:
        self._nvml = self.inner.nvml()
        return self._nvml

    def root(self) -> bool:
        return self.inner.root()

    def save(self, folder: str | Path) -> None:
        """Write what was read so far; the folder is made when it is missing."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        tree = {"files": self._files, "links": self._links, "dirs": self._dirs}
        meta = {"format": FORMAT, "root": self.root(), "python": platform.python_version()}
        for name, value in (("sysfs", tree), ("nvml", self._nvml), ("meta", meta)):
            (target / f"{name}.json").write_text(json.dumps(value, indent=0, sort_keys=True) + "\n")


def _brief(cpuinfo: bytes) -> bytes:
    """The lines of /proc/cpuinfo that discovery looks at, each once."""
    kept: dict[str, None] = {}
    for line in cpuinfo.decode(errors="replace").splitlines():
        key = line.split(":")[0].strip()
        if key in ("model name", "physical id"):
            kept[line] = None
        elif key == "flags" and " hypervisor" in line:
            kept["flags\t: hypervisor"] = None
    return "\n".join([*kept, ""]).encode()


def _encode(data: bytes) -> str | dict[str, Any]:
    """Text as it is; binary (PCI configuration space) as its length and its non-zero rows of 16 bytes."""
    if b"\0" not in data:
        try:
            return data.decode("ascii")
        except UnicodeDecodeError:
            pass
    rows = {
        f"{at:03x}": data[at : at + 16].hex()
        for at in range(0, len(data), 16)
        if any(data[at : at + 16])
    }
    return {"length": len(data), "rows": rows}


def _decode(stored: str | dict[str, Any]) -> bytes:
    if isinstance(stored, str):
        return stored.encode()
    data = bytearray(stored["length"])
    for at, row in stored["rows"].items():
        piece = bytes.fromhex(row)
        data[int(at, 16) : int(at, 16) + len(piece)] = piece
    return bytes(data)
