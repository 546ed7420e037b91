"""Schedules as data: who sends which tile to whom in which hop, as `csrc/core/schedule.h` decides it.

`describe(...)` returns every hop of a call with its bytes; printing, pictures, the fabric simulator and the
byte-count tests all read it, and the engines run the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence

SCHEDULES = (
    "one_shot",
    "two_shot",
    "island_two_hop",
    "island_dataflow",
    "island_ring",
    "mailbox",
)


def islands_text(islands: str | Sequence[Sequence[int]] | None) -> str:
    """Write a partition as the engine reads it: "0,1;2,3"; None is the empty text, one island."""
    if islands is None:
        return ""
    if isinstance(islands, str):
        return islands.replace(" ", "")
    return ";".join(",".join(str(rank) for rank in island) for island in islands)
