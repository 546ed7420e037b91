"""The plan: which backend, schedule and CTA count serve each operation at each number of rows.

A plan is made by rank 0, sent to all ranks and compared by digest before its first use. It is immutable, so what
the log prints, what the counters are labelled with and what runs is one object.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
from rich.table import Table

from sglang_sm120.comm.communicator import CollectiveError, Op

Exchange = Callable[
    [Any], list[Any]
]  # all_gather of a picklable object: one entry per rank, in rank order

VERSION: Final = 1  # of the JSON form; a cached plan of another version is not used
BASELINE: Final = "nccl"  # what SGLang does without this plugin; on CPU tensors that is gloo


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Who serves a call, and how.

    Attributes:
        backend: "native", "mailbox", "host", "flashinfer" or "nccl" (SGLang's own path).
        schedule: "one_shot", "two_shot", "island_two_hop", "island_dataflow", "island_ring" (names of
            `comm.schedule`), or "" where the backend decides.
        ctas: thread blocks of the kernel; 0 where the backend decides.
        us: expected microseconds per call, 0.0 when unknown.
        baseline_us: the same for the baseline; 0.0 when it was not timed.
        source: "timed", "between" (interpolated between timed rows), "model" or "pinned".
    """

    backend: str
    schedule: str = ""
    ctas: int = 0
    us: float = 0.0
    baseline_us: float = 0.0
    source: str = "model"

    @property
    def name(self) -> str:
        """backend/schedule/CTAs, the parts that decide what runs."""
        return "/".join(
            p for p in (self.backend, self.schedule, f"{self.ctas}c" * (self.ctas > 0)) if p
        )


class Entry(msgspec.Struct, frozen=True):
    """`choice` serves `op` for row counts up to `rows`, above those of the entry before."""

    op: Op
    rows: int
    choice: Choice


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Decisions for one group of ranks, one hidden size and one dtype.

    Attributes:
        group, world: SGLang's group name and its number of ranks.
        hidden: elements per row; itemsize: bytes per element.
        islands: the partition that fixes the canonical order of every sum; one for the whole plan.
        entries: ascending rows per operation; rows are exactly the captured ones.
        fallback: what serves rows above the last entry, and operations without entries.
        forbidden: schedules that the probe saw collapse, each with the pattern and its ratio.
        notes: one line each on why something is off; printed below the table.
    """

    group: str
    world: int
    hidden: int
    itemsize: int
    islands: tuple[tuple[int, ...], ...]
    entries: tuple[Entry, ...] = ()
    fallback: Choice = Choice(backend=BASELINE)
    forbidden: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    version: int = VERSION

    @cached_property
    def _by_op(self) -> dict[Op, tuple[list[int], list[Choice]]]:
        out: dict[Op, tuple[list[int], list[Choice]]] = {}
        for entry in sorted(self.entries, key=lambda e: e.rows):
            rows, choices = out.setdefault(entry.op, ([], []))
            rows.append(entry.rows)
            choices.append(entry.choice)
        return out

    def lookup(self, op: Op, rows: int) -> Choice:
        """The choice for `op` on `rows` rows; a pure function, equal on every rank with the same plan."""
        bounds, choices = self._by_op.get(op, ((), ()))
        i = bisect_left(bounds, rows)
        return choices[i] if i < len(bounds) else self.fallback

    def serves(self, backend: str) -> bool:
        """Whether any entry uses `backend`."""
        return any(e.choice.backend == backend for e in self.entries)

    def digest(self) -> str:
        """16 hex digits over everything that decides what runs; expected times and notes do not count."""
        what = (
            (self.version, self.group, self.world, self.hidden, self.itemsize, self.islands),
            [(e.op.value, e.rows, e.choice.name) for e in self.entries],
            self.fallback.name,
        )
        return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:16]

    def ranges(self, op: Op) -> list[tuple[int, int, Choice]]:
        """(first row, last row, choice) of neighbouring entries with one choice, ascending.

        The choice is that of the last row, so its times are those of the widest message.
        """
        out: list[tuple[int, int, Choice]] = []
        first = 1
        bounds, choices = self._by_op.get(op, ([], []))
        for rows, choice in zip(bounds, choices, strict=True):
            if out and out[-1][2].name == choice.name:
                out[-1] = (out[-1][0], rows, choice)
            else:
                out.append((first, rows, choice))
            first = rows + 1
        return out

    def sentence(self) -> str:
        """One log line that says what really runs, per operation and rows."""
        parts = []
        for op in self._by_op:
            spans = [f"{a}-{b} rows {c.name}" for a, b, c in self.ranges(op)]
            parts.append(f"{op.value}: {', '.join(spans)}, more {self.fallback.name}")
        if not any(e.choice.backend != BASELINE for e in self.entries):
            parts = [f"every call stays on {self.fallback.name}"]
        return f"SM120 plan {self.digest()} for group {self.group}: {'; '.join(parts)}"

    def table(self) -> Table:
        """The plan as a table, one row per range of rows."""
        islands = " ".join("{" + ",".join(map(str, i)) + "}" for i in self.islands)
        out = Table(title=f"SM120 plan {self.digest()}, group {self.group}, islands {islands}")
        for column in ("operation", "rows", "KiB", "serves", "us", "SGLang us", "from"):
            out.add_column(
                column, justify="right" if column in ("rows", "KiB", "us", "SGLang us") else "left"
            )
        for op in self._by_op:
            for first, last, c in self.ranges(op):
                size = last * self.hidden * self.itemsize / 1024
                out.add_row(
                    op.value,
                    f"{first}-{last}",
                    f"{size:.0f}",
                    c.name,
                    _us(c.us),
                    _us(c.baseline_us),
                    c.source,
                )
        out.add_row("any", "more", "", self.fallback.name, "", "", self.fallback.source)
        lines = [f"{k} is never used: {why}" for k, why in self.forbidden.items()]
        out.caption = "\n".join([*lines, *self.notes]) or None
        return out

    def to_json(self) -> bytes:
        """The plan as JSON; `from_json` reads it back."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Plan:
        """Read a plan; msgspec.ValidationError or ValueError when it is not one of this version."""
        plan = msgspec.json.decode(data, type=cls)
        if plan.version != VERSION:
            raise ValueError(f"plan of version {plan.version}; this release reads {VERSION}")
        return plan


def _us(value: float) -> str:
    return f"{value:.1f}" if value else "-"


def captured_rows(batch_sizes: Iterable[int], tokens_per_request: Sequence[int]) -> tuple[int, ...]:
    """Row counts that SGLang will capture: every batch size times every tokens-per-request.

    `tokens_per_request` is (1,) without speculation; with it, the verify width (draft tokens) and the draft
    model's own widths are further entries.
    """
    return tuple(
        sorted({b * t for b in batch_sizes for t in tokens_per_request if b > 0 and t > 0})
    )


def agree(mine: Plan | None, rank: int, exchange: Exchange) -> Plan:
    """Give every rank rank 0's plan and check that all hold the same.

    Collective: every rank of the group calls it once, rank 0 with the plan, the others with None (or with a
    plan of their own, which must then be the same).

    Raises:
        CollectiveError: on every rank alike, naming the ranks whose digest differs and both digests.
    """
    plan = Plan.from_json(exchange(mine.to_json() if mine is not None and rank == 0 else None)[0])
    held = mine if mine is not None else plan
    return same_on_all(held, rank, exchange)


def same_on_all(plan: Plan, rank: int, exchange: Exchange) -> Plan:
    """Compare digests over all ranks; return `plan`, or raise on every rank.

    Raises:
        CollectiveError: naming the ranks whose plan differs from rank 0's.
    """
    digests: list[str] = exchange(plan.digest())
    other = [r for r, d in enumerate(digests) if d != digests[0]]
    if other:
        shown = ", ".join(f"rank {r}: {digests[r]}" for r in other)
        raise CollectiveError(
            f"rank {rank}, group {plan.group}: plans differ ({shown}; rank 0: {digests[0]}). "
            "Start all ranks with the same plugin version and options, and delete the plan cache."
        )
    return plan
