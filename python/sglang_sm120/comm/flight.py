"""What went wrong in a GPU call, as one sentence: from the flight record and the records that ranks leave when they begin."""

from __future__ import annotations

import contextlib
from typing import Any

from sglang_sm120.comm.communicator import Op

# In the order of the C++ enumerations.
_DTYPES = ("float32", "bfloat16", "float16")
PHASES = ("idle", "push", "reduce", "cross", "gather", "record")
OPS = (Op.ALL_REDUCE, Op.ALL_REDUCE_RMSNORM, Op.ALL_REDUCE_RMSNORM_FP8)
_LEFT, _MISMATCH = 3, 4

Shape = tuple[int, int, int, int]  # rows, hidden, operation, dtype


def sentence(library: Any, handle: int, name: str, rank: int, world: int) -> str:
    """Which ranks, which call, which shape, how long.

    Args:
        library: the CUDA library.
        handle: the channel.
        name: of the group, for the text.
        rank, world: of this process in the group.
    """
    flight = list(library.cuda_flight(handle))
    if not flight:
        return f"{name}: no failure on rank {rank}"
    _, channel, phase, tile, source, op, dtype, rows, hidden, call, waited, why = flight
    what = _text(rows, hidden, op, dtype)
    where = f"{name}, channel {channel}, call {call}, rank {rank}"
    # The records tell a rank that never came from one that waits too.
    missing, others = _who_called(library, handle, call, rank, world)
    for other, shape in others.items():
        if shape != (rows, hidden, op, dtype):
            return (
                f"{where}: call mismatch: this rank called {what}, "
                f"rank {other} called {_text(*shape)}"
            )
    if why == _MISMATCH:
        return f"{where}: call mismatch: this rank called {what}, rank {source} something else"
    waited_for = (
        f"this rank waited for rank {source}, phase {PHASES[phase]}, tile {tile}, "
        f"bound {waited / 1e6:.0f} ms"
    )
    told_so = why == _LEFT
    found = ", as another rank found" if told_so else ""
    if not missing and told_so and (told := _mismatch_ahead(library, handle, call, rank, world)):
        return f"{where}: {told}"
    if not missing and (others or not told_so):
        # Whom this rank waited for may itself have waited for the one that the other rank names.
        whose, who = ("", "a rank") if told_so else (f" of rank {source}", "the rank")
        return (
            f"{where}: all ranks began {what}, but data{whose} did not arrive in time{found}: {who} came late, its GPU "
            f"could not run the whole kernel beside other work, or its stores are lost ({waited_for})"
        )
    named = missing or [source]
    ranks = " and ".join(str(other) for other in named)
    verb = "are" if len(named) > 1 else "is"
    noun = "ranks" if len(named) > 1 else "rank"
    return f"{where}: {noun} {ranks} {verb} missing in {what}{found} ({waited_for})"


def _mismatch_ahead(library: Any, handle: int, call: int, rank: int, world: int) -> str:
    """How ranks that are one call ahead disagree there, which ends this call too; "" where they do not."""
    _, ahead = _who_called(library, handle, call + 1, rank, world)
    first = next(iter(ahead), -1)
    for other, shape in ahead.items():
        if shape != ahead[first]:
            return (
                f"call mismatch in call {call + 1}: rank {first} called {_text(*ahead[first])}, "
                f"rank {other} called {_text(*shape)}"
            )
    return ""


def _who_called(
    library: Any, handle: int, call: int, rank: int, world: int
) -> tuple[list[int], dict[int, Shape]]:
    """(ranks that have not begun `call`, the shapes of those that have), from the call records."""
    missing: list[int] = []
    others: dict[int, Shape] = {}
    with contextlib.suppress(RuntimeError):
        # A later call clears this call's records: who is found there has been here.
        later = {
            other
            for ahead in (1, 2)
            for other, record in enumerate(_records(library, handle, call + ahead, world))
            if record[0] > call
        }
        records = _records(library, handle, call, world)
        for other, (epoch, rows, hidden, op, dtype) in enumerate(records):
            if other == rank or other in later:
                continue
            if epoch < call:
                missing.append(other)
            elif epoch == call:
                others[other] = (rows, hidden, op, dtype)
    return missing, others


def _records(
    library: Any, handle: int, call: int, world: int
) -> list[tuple[int, int, int, int, int]]:
    """Per rank (epoch, rows, hidden, op, dtype) of the call in that call's slot; -1 where none arrived."""
    flat = list(library.cuda_records(handle, call, world))
    return [tuple(flat[i : i + 5]) for i in range(0, len(flat), 5)]


def _text(rows: int, hidden: int, op: int, dtype: int) -> str:
    return f"{OPS[op].value}, {rows} x {hidden} {_DTYPES[dtype]}"
