"""Measured plans kept between starts: used again only on the very same machine and software."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Collection
from pathlib import Path

import msgspec

from sglang_sm120.comm.plan import Plan
from sglang_sm120.fabric.report import ProbeReport
from sglang_sm120.fabric.versions import Versions

logger = logging.getLogger(__name__)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a measured plan depends on; a plan is used again only when all of it is equal.

    Attributes:
        gpus: UUIDs in rank order (or host names and CPU where there are no GPUs).
        versions: plugin, SGLang, PyTorch, FlashInfer, NCCL, driver.
        group, world, hidden, itemsize, rows: what was planned for.
        options: settings that change candidates (backend, wire, islands), as text.
        kernel: release of the running kernel, which decides on IOMMU and link handling.
    """

    gpus: tuple[str, ...]
    versions: Versions
    group: str
    world: int
    hidden: int
    itemsize: int
    rows: tuple[int, ...]
    options: str = ""
    kernel: str = ""

    def key(self) -> str:
        """File name: 24 hex digits over the whole identity."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:24]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One kept plan with the identity it was made for and the probe's report it rests on."""

    identity: Identity
    plan: Plan
    report: ProbeReport | None = None


def folder(setting: str) -> Path | None:
    """The folder of `--sm120-plan-cache`: None for "off", the user's cache folder for ""."""
    if setting == "off":
        return None
    try:
        return Path(setting or "~/.cache/sglang-sm120/plans").expanduser()
    except (
        RuntimeError
    ) as error:  # a user without a home, as in containers that run under a bare number
        logger.warning("plans are not kept between starts: %s Set --sm120-plan-cache.", error)
        return None


def load(where: Path | None, identity: Identity) -> Record | None:
    """The kept record of this identity, or None; a damaged file counts as none and is said in the log."""
    if where is None:
        return None
    path = where / f"{identity.key()}.json"
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
        Plan.from_json(record.plan.to_json())  # checks the version
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        logger.warning("the kept plan %s is not used: %s", path, error)
        return None
    return record if record.identity == identity else None


def verified_p2p(
    where: Path | None, gpus: Collection[str], versions: Versions, kernel: str
) -> bool:
    """Whether a kept probe has verified stores between all of `gpus`, under this driver and kernel.

    Only then may NCCL be told to use peer-to-peer between any two of them (see `nccl.environment.settings`).
    """
    for path in sorted(where.glob("*.json")) if where and gpus else []:
        try:
            record = msgspec.json.decode(path.read_bytes(), type=Record)
        except (OSError, msgspec.MsgspecError):
            continue  # another release's, or damaged: proves nothing
        report, who = record.report, record.identity
        same = (who.versions.driver, who.kernel) == (versions.driver, kernel)
        proven = report is not None and report.sound and not report.staged and report.need == "p2p"
        if (
            same
            and proven
            and report is not None
            and not report.simulated
            and set(gpus) <= set(who.gpus)
        ):
            return True
    return False


def store(where: Path | None, record: Record) -> Path | None:
    """Write a record; another process never sees half of it. A folder that cannot be written is only logged."""
    if where is None:
        return None
    path = where / f"{record.identity.key()}.json"
    try:
        where.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=where, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(record))
            os.replace(scratch, path)
        except OSError:
            Path(scratch).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.warning("the plan is not kept in %s: %s", where, error)
        return None
    return path
