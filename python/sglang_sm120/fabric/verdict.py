"""The verdict: one object that every fast path asks, and that can only say no.

Vetoes come from the probe, the topology, installed versions and the user's own settings. Nothing removes a veto
but the user's explicit force, and that only for vetoes marked as wishes. Ranks exchange their vetoes and take the
union, so a veto seen by one rank stops the path on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from sglang_sm120.fabric.versions import check_flashinfer
from sglang_sm120.nccl.environment import p2p_disabled_by_user

logger = logging.getLogger(__name__)

Exchange = Callable[
    [Any], list[Any]
]  # all_gather of a picklable object: one entry per rank, in rank order

# Fast path -> what it needs. A veto of a need stops every path that has it.
NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "native": ("p2p", "one-host"),
    "mailbox": ("host-memory", "one-host"),
    "host": ("one-host",),
    "flashinfer": ("p2p", "one-host", "flashinfer-sm120"),
    "nccl": (),
}


class Veto(msgspec.Struct, frozen=True, kw_only=True):
    """One reason against one need or path.

    Attributes:
        target: a need ("p2p", "host-memory", "one-host", ...), a path ("native", ...), or one way of a path to run, by the
            name of its plan's choice ("flashinfer/pcie_unstaged/16c").
        reason: what was seen, with the figures.
        remedy: the line to type or the switch to turn; may be empty.
        ranks: the ranks (or the edge's two ranks) that it is about.
        origin: "probe", "topology", "user", "version" or "exchange".
        wish: the user asked for it (an environment variable): `force` may lift it.
    """

    target: str
    reason: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    origin: str = "probe"
    wish: bool = False


class Verdict:
    """What may not run in one group of ranks.

    Attributes:
        group: name of the group the verdict is for.
        rank: this process's rank in it.
        vetoes: every veto so far, in order of arrival, without repeats.
    """

    def __init__(self, group: str = "tp", rank: int = 0) -> None:
        self.group = group
        self.rank = rank
        self.vetoes: list[Veto] = []
        self._said: set[str] = set()

    def veto(self, veto: Veto) -> None:
        """Add one reason against something; adding the same twice is the same as once."""
        if veto not in self.vetoes:
            self.vetoes.append(veto)

    def add(self, vetoes: Iterable[Veto]) -> None:
        """Add several."""
        for veto in vetoes:
            self.veto(veto)

    def against(self, path: str) -> list[Veto]:
        """The vetoes that stop `path`, or one way of it; empty means it may run. KeyError for an unknown path."""
        backend = path.split("/")[0]
        needs = {path, backend, *NEEDS[backend]}
        return [v for v in self.vetoes if v.target in needs]

    def allows(self, path: str) -> bool:
        """Whether `path` (a backend: "native", "mailbox", "flashinfer", "nccl", "host"; or a way of one) may run."""
        return not self.against(path)

    def why(self, path: str) -> str:
        """One sentence: why `path` may not run, and what would change that; "" when it may."""
        parts = []
        for v in self.against(path):
            who = f" (rank {', '.join(map(str, v.ranks))})" if v.ranks else ""
            parts.append(f"{v.reason}{who}" + (f". Remedy: {v.remedy}" if v.remedy else ""))
        return "; ".join(parts)

    def force(self) -> None:
        """Lift the user's own wishes, because the user forced the custom path; facts stay."""
        self.vetoes = [v for v in self.vetoes if not v.wish]

    def agree(self, exchange: Exchange) -> Verdict:
        """Take the union of all ranks' vetoes, in rank order, so that every rank holds the same list.

        Every rank of the group must call this. The first rank to see a veto is named in it.
        """
        merged: list[Veto] = []
        for rank, theirs in enumerate(exchange([msgspec.to_builtins(v) for v in self.vetoes])):
            for item in theirs:
                veto = msgspec.convert(item, Veto)
                if not veto.ranks and not veto.wish:
                    veto = msgspec.structs.replace(veto, ranks=(rank,))
                same = [m for m in merged if (m.target, m.reason) == (veto.target, veto.reason)]
                if same:
                    i = merged.index(same[0])
                    both = tuple(sorted({*same[0].ranks, *veto.ranks}))
                    merged[i] = msgspec.structs.replace(same[0], ranks=both)
                else:
                    merged.append(veto)
        self.vetoes = merged
        return self

    def log_once(self, path: str) -> None:
        """Rank 0 writes one line about why `path` is off; repeats and allowed paths write nothing."""
        reason = self.why(path)
        if reason and self.rank == 0 and path not in self._said:
            self._said.add(path)
            logger.warning("SM120 %s path is off for group %s: %s", path, self.group, reason)


def user_vetoes(environ: Mapping[str, str]) -> list[Veto]:
    """What the user switched off by NCCL's own variables counts for this plugin's kernels too."""
    off = p2p_disabled_by_user(environ)
    if not off:
        return []
    return [
        Veto(
            target="p2p",
            reason=f"{off} is set by the user",
            remedy=f"unset {off.split('=')[0]}, or force the custom path",
            origin="user",
            wish=True,
        )
    ]


def host_vetoes(hosts: Iterable[str]) -> list[Veto]:
    """A group that spans hosts has no peer memory. `hosts`: one identity (boot id) per rank, in rank order."""
    seen = list(hosts)
    if len(set(seen)) <= 1:
        return []
    away = tuple(r for r, h in enumerate(seen) if h != seen[0])
    return [
        Veto(
            target="one-host",
            reason=f"the group spans {len(set(seen))} hosts",
            remedy="keep each tensor-parallel group on one host",
            ranks=away,
            origin="topology",
        )
    ]


def version_vetoes(flashinfer: str) -> list[Veto]:
    """FlashInfer's all-reduce needs the release with the 12.x kernels."""
    refusal = check_flashinfer(flashinfer)
    if refusal is None:
        return []
    return [
        Veto(
            target="flashinfer-sm120",
            reason=refusal.reason,
            remedy=refusal.remedy,
            origin="version",
        )
    ]
