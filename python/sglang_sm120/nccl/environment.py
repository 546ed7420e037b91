"""The NCCL environment: what the plugin adds (never overriding the user), and what in it is harmful.

Everything works on an environment mapping that is passed in; nothing here reads the process environment.
Sources of the rules are named beside them: NVIDIA/nccl 2.30.7 files, or public issues.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from enum import Enum
from typing import Final

import msgspec
from rich.table import Table

from sglang_sm120.fabric.versions import check_nccl, parse
from sglang_sm120.nccl import memory

FUNCTIONS: Final = ("AllGather", "Broadcast", "Reduce", "ReduceScatter")  # besides AllReduce
# Without NVSwitch or SHARP these exist for AllReduce only (src/graph/tuning.cc).
ALL_REDUCE_ONLY: Final = frozenset({"tree", "collnetdirect", "collnetchain", "nvls", "nvlstree"})
P2P_LEVELS: Final = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")  # levelsOldToNew, src/graph/paths.cc
BUFFER_LIMIT: Final = 16 * memory.MIB
# Shown in the table of effective values even when nobody sets them: (name, NCCL's default).
SHOWN: Final[dict[str, str]] = {
    "NCCL_ALGO": "all",
    "NCCL_PROTO": "LL, Simple (LL128 not over PCIe)",
    "NCCL_P2P_LEVEL": "PXB (SYS on AMD with 2 GPUs)",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_BUFFSIZE": str(memory.SIMPLE_DEFAULT),
    "NCCL_LL128_BUFFSIZE": str(memory.LL128_DEFAULT),
    "NCCL_MIN_CTAS": "1",
    "NCCL_MAX_CTAS": "64",
    "NCCL_CUMEM_ENABLE": "0 (set by SGLang)",
    "NCCL_GRAPH_FILE": "",
}
_REASONS: Final[dict[str, str]] = {
    "NCCL_P2P_LEVEL": "stores between all GPUs of this machine were verified by the probe",
    "NCCL_LL128_BUFFSIZE": "NCCL never picks LL128 over PCIe; its default buffer is half of all memory",
}


class Level(str, Enum):
    """What a finding asks for: start no server, a value was changed, a value is doubtful."""

    ERROR = "error"
    CORRECTION = "correction"
    WARNING = "warning"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong with the environment.

    `corrected` is the value that `apply` puts in place (corrections only); `remedy` is what to type.
    """

    level: Level
    name: str
    value: str
    reason: str
    remedy: str
    corrected: str | None = None

    def sentence(self) -> str:
        """The finding as one log line."""
        change = f" -> {self.corrected}" if self.corrected is not None else ""
        return f"{self.level.value}: {self.name}={self.value}{change}: {self.reason}. {self.remedy}"


class Effective(msgspec.Struct, frozen=True):
    """One variable as NCCL will see it; `origin` is "user", "plugin", "corrected" or "default"."""

    name: str
    value: str
    origin: str
    note: str = ""


class EnvironmentRefused(RuntimeError):
    """The NCCL environment has an error that the plugin must not paper over; the text lists all of them."""


def settings(
    environ: Mapping[str, str], *, verified_p2p: bool = False, pcie_only: bool = False
) -> dict[str, str]:
    """What the plugin would add to `environ`; a variable that the user set is never in the answer.

    Args:
        environ: the user's environment.
        verified_p2p: the probe has verified stores between all pairs of GPUs on this very machine. Only then
            may NCCL be told to use peer-to-peer across root ports and sockets: on a machine whose peer
            writes do not arrive, that setting makes the first collective hang.
        pcie_only: no NVLink between any two GPUs, so the LL128 protocol is never picked and its buffer is waste.
    """
    out: dict[str, str] = {}
    if verified_p2p and not p2p_disabled_by_user(environ):
        out["NCCL_P2P_LEVEL"] = "SYS"
    if pcie_only and not any("LL128" in f.reason for f in _proto(environ)):
        out["NCCL_LL128_BUFFSIZE"] = str(256 * memory.KIB)
    return {name: value for name, value in out.items() if name not in environ}


def check(
    environ: Mapping[str, str],
    *,
    nccl_version: str = "",
    nccl_cuda: str = "",
    world: int = 8,
    sub_groups: bool = False,
    sm120: bool = True,
    tree_is_error: bool = False,
) -> list[Finding]:
    """Everything harmful in `environ`, most severe first.

    Args:
        nccl_version, nccl_cuda: of the library that will be loaded, and the CUDA it was built with.
        world: GPUs of the node in use.
        sub_groups: whether the server makes groups smaller than all GPUs (DP attention, EP x TP, DCP).
        sm120: whether the GPUs have compute capability 12.x.
        tree_is_error: refuse a bare `NCCL_ALGO=Tree` instead of correcting it.
    """
    found = [
        *_algo(environ, nccl_version, tree_is_error),
        *_proto(environ),
        *_levels(environ),
        *_buffers(environ),
        *_files(environ, sub_groups, world),
        *_transports(environ),
    ]
    refusal = check_nccl(nccl_version, nccl_cuda) if sm120 else None
    if refusal:
        level = Level.ERROR if refusal.fatal else Level.WARNING
        found.append(
            Finding(
                level=level,
                name="NCCL version",
                value=nccl_version,
                reason=refusal.reason,
                remedy=refusal.remedy,
            )
        )
    return sorted(found, key=lambda f: list(Level).index(f.level))


def apply(
    environ: MutableMapping[str, str], additions: Mapping[str, str], findings: list[Finding]
) -> list[Effective]:
    """Add `additions` where the user set nothing, put corrections in place, and return what is in force.

    Call before the first communicator of the process: NCCL reads its environment once.

    Raises:
        EnvironmentRefused: `findings` has an error.
    """
    errors = [f.sentence() for f in findings if f.level is Level.ERROR]
    if errors:
        raise EnvironmentRefused("the NCCL environment cannot work:\n" + "\n".join(errors))
    user = {name: value for name, value in environ.items() if name.startswith("NCCL_")}
    corrections = {f.name: f for f in findings if f.corrected is not None}
    for name, finding in corrections.items():
        environ[name] = str(finding.corrected)
    for name, value in additions.items():
        environ.setdefault(name, value)
    out: list[Effective] = []
    for name in sorted({*user, *additions, *SHOWN}):
        if name in corrections:
            out.append(Effective(name, environ[name], "corrected", f"was {user[name]}"))
        elif name in user:
            out.append(Effective(name, user[name], "user"))
        elif name in additions:
            out.append(Effective(name, environ[name], "plugin", _REASONS.get(name, "")))
        else:
            out.append(Effective(name, SHOWN[name], "default"))
    return out


def table(effective: list[Effective]) -> Table:
    """The values in force as a table for the log."""
    out = Table(title="NCCL environment")
    for column in ("variable", "value", "origin", "note"):
        out.add_column(column, overflow="fold")
    for row in effective:
        out.add_row(row.name, row.value, row.origin, row.note)
    return out


def p2p_disabled_by_user(environ: Mapping[str, str]) -> str:
    """The variable by which the user switched peer-to-peer off ("NCCL_P2P_DISABLE=1"), or "".

    NCCL reads the flag with strtol and compares with 1; level 0 is the old spelling of LOC.
    """
    if environ.get("NCCL_P2P_DISABLE", "").strip() == "1":
        return "NCCL_P2P_DISABLE=1"
    level = environ.get("NCCL_P2P_LEVEL", "").strip()
    return f"NCCL_P2P_LEVEL={level}" if level.upper() in ("LOC", "0") else ""


def _algo(environ: Mapping[str, str], version: str, refuse: bool) -> list[Finding]:
    value = environ.get("NCCL_ALGO", "").strip()
    default = value.split(";")[0]  # only the first list may lack a function name
    if not value or ":" in default or default.startswith("^"):
        return []
    names = [name.strip().lower() for name in default.split(",")]
    if not set(names) <= ALL_REDUCE_ONLY:
        return []
    rest = value.split(";")[1:]
    named = {part.split(":")[0].strip().lower() for part in rest}
    broken = [f for f in FUNCTIONS if f.lower() not in named]
    if not broken:
        return []
    corrected = ";".join([f"allreduce:{','.join(names)}", *rest])
    old = parse(version) and parse(version) < (2, 24)
    if old:
        return [
            Finding(
                level=Level.WARNING,
                name="NCCL_ALGO",
                value=value,
                reason=f"{default} exists for AllReduce only and is a chain on one node: no gain",
                remedy="Unset NCCL_ALGO.",
            )
        ]
    reason = (
        f"{default} exists for AllReduce only; since NCCL 2.24 {', '.join(broken)} then fail with "
        "ncclInvalidUsage and abort CUDA graph capture, and on one node a tree is a chain: no gain"
    )
    if refuse:
        return [
            Finding(
                level=Level.ERROR,
                name="NCCL_ALGO",
                value=value,
                reason=reason,
                remedy=f"Unset it, or export NCCL_ALGO='{corrected}'.",
            )
        ]
    return [
        Finding(
            level=Level.CORRECTION,
            name="NCCL_ALGO",
            value=value,
            reason=reason,
            remedy="Better unset it.",
            corrected=corrected,
        )
    ]


def _proto(environ: Mapping[str, str]) -> list[Finding]:
    value = environ.get("NCCL_PROTO", "").strip()
    found: list[Finding] = []
    for part in value.split(";") if value else []:
        listed = part.split(":")[-1].strip()
        names = {name.strip().upper() for name in listed.lstrip("^").split(",")}
        forced = "LL128" not in names if listed.startswith("^") else "LL128" in names
        if forced:
            found.append(
                Finding(
                    level=Level.WARNING,
                    name="NCCL_PROTO",
                    value=value,
                    reason=f"{listed} allows LL128 over PCIe, where a CPU may split its 128-byte stores: "
                    "silent corruption (NCCL's guide; nccl issues 786, 2036)",
                    remedy="Unset NCCL_PROTO, or add it back as NCCL_PROTO='^LL128'.",
                )
            )
        elif not listed.startswith("^") and names == {"LL"}:
            found.append(
                Finding(
                    level=Level.WARNING,
                    name="NCCL_PROTO",
                    value=value,
                    reason="LL alone halves the payload of every byte sent: prefill slows down",
                    remedy="Unset NCCL_PROTO: small messages use LL anyway.",
                )
            )
    return found


def _levels(environ: Mapping[str, str]) -> list[Finding]:
    found: list[Finding] = []
    value = environ.get("NCCL_P2P_LEVEL", "").strip()
    if value[:1].isdigit():
        meant = P2P_LEVELS[min(int(value), len(P2P_LEVELS) - 1)] if value.isdigit() else "?"
        found.append(
            Finding(
                level=Level.WARNING,
                name="NCCL_P2P_LEVEL",
                value=value,
                reason=f"the old integer form; NCCL reads it as {meant}, published recipes often mean another",
                remedy=f"Write the name: NCCL_P2P_LEVEL={meant}.",
            )
        )
    off = p2p_disabled_by_user(environ)
    if off:
        name, _, setting = off.partition("=")
        found.append(
            Finding(
                level=Level.WARNING,
                name=name,
                value=setting,
                reason="peer-to-peer is switched off: every message crosses host memory (~14 us each way), "
                "and this plugin's peer kernels stay off as well",
                remedy=f"Unset {name} once `sglang-sm120 doctor` finds nothing wrong.",
            )
        )
    return found


def _buffers(environ: Mapping[str, str]) -> list[Finding]:
    buffers = memory.Buffers.from_environ(environ)
    if buffers.simple < BUFFER_LIMIT:
        return []
    each = memory.channel_bytes(buffers)
    return [
        Finding(
            level=Level.WARNING,
            name="NCCL_BUFFSIZE",
            value=environ["NCCL_BUFFSIZE"],
            reason=f"{each // memory.MIB} MiB of GPU memory per channel and communicator "
            f"({8 * each / 2**30:.2f} GiB at 8 channels, {64 * each / 2**30:.2f} GiB at 64) and no gain at "
            "decode sizes",
            remedy=f"Unset it (default {memory.SIMPLE_DEFAULT // memory.MIB} MiB).",
        )
    ]


def _files(environ: Mapping[str, str], sub_groups: bool, world: int) -> list[Finding]:
    value = environ.get("NCCL_GRAPH_FILE", "").strip()
    if not value or not (sub_groups or world > 8):
        return []
    cause = "groups smaller than the machine" if sub_groups else f"{world} ranks"
    return [
        Finding(
            level=Level.ERROR if sub_groups else Level.WARNING,
            name="NCCL_GRAPH_FILE",
            value=value,
            reason=f"the file describes one search result for all ranks, and this server has {cause}: "
            "their communicators fail with 'unhandled system error'",
            remedy="Unset NCCL_GRAPH_FILE; to correct link speeds use NCCL_TOPO_FILE, which fits every group.",
        )
    ]


def _transports(environ: Mapping[str, str]) -> list[Finding]:
    if environ.get("NCCL_SHM_DISABLE", "").strip() != "1":
        return []
    return [
        Finding(
            level=Level.WARNING,
            name="NCCL_SHM_DISABLE",
            value="1",
            reason="pairs of GPUs without peer-to-peer then talk over network sockets",
            remedy="Unset NCCL_SHM_DISABLE.",
        )
    ]
