"""What is said about a failed call, from the records that ranks leave; the CUDA library is a stand-in."""

from __future__ import annotations

import pytest
from sglang_sm120.comm import flight

CALL, ROWS, HIDDEN, OP, BF16 = 7, 16, 7168, 1, 1
PHASE_REDUCE, TILE, BOUND_NS = 2, 28, 60_000_000_000
MISSING, LEFT = 1, 3


class Library:
    """Answers with one flight record, and the call record of each rank: the newest call it has begun."""

    def __init__(self, newest: list[int], why: int, source: int) -> None:
        self.newest, self.why, self.source = newest, why, source

    def cuda_flight(self, handle: int) -> list[int]:
        return [0, 0, PHASE_REDUCE, TILE, self.source, OP, BF16, ROWS, HIDDEN, CALL, BOUND_NS, self.why]  # fmt: skip

    def cuda_records(self, handle: int, call: int, world: int) -> list[int]:
        out: list[int] = []
        for newest in self.newest:
            # A rank's records of earlier calls are cleared by its later ones.
            out += [call, ROWS, HIDDEN, OP, BF16] if newest == call else [-1] * 5
        return out


def said(newest: list[int], why: int, source: int) -> str:
    return flight.sentence(Library(newest, why, source), 1, "tp", 0, len(newest))


@pytest.mark.parametrize(
    ("newest", "why", "source", "expected"),
    [
        ([7, 7, 6, 7], MISSING, 2, "rank 2 is missing in all_reduce_rmsnorm, 16 x 7168 bfloat16"),
        ([7, 6, 6, 8], MISSING, 1, "ranks 1 and 2 are missing in all_reduce_rmsnorm"),
        ([7, 7, 7, 7], MISSING, 2, "all ranks began all_reduce_rmsnorm, 16 x 7168 bfloat16, but data of rank 2"),
        ([7, 8, 9, 7], MISSING, 2, "its GPU could not run the whole kernel beside other work, or its stores are lost"),
        ([7, 7, 6, 7], LEFT, 2, "rank 2 is missing in all_reduce_rmsnorm, 16 x 7168 bfloat16, as another rank found"),
        ([7, 7, 7, 7], LEFT, 2, "data did not arrive in time, as another rank found: a rank came late, its GPU could"),
    ],
)  # fmt: skip
def test_only_ranks_that_never_began_the_call_are_called_missing(
    newest: list[int], why: int, source: int, expected: str
) -> None:
    text = said(newest, why, source)
    assert expected in text
    assert f"waited for rank {source}, phase reduce, tile 28, bound 60000 ms" in text


def test_a_late_rank_says_that_the_others_disagree_in_the_next_call() -> None:
    class Ahead(Library):
        def cuda_records(self, handle: int, call: int, world: int) -> list[int]:
            flat = super().cuda_records(handle, call, world)
            if call == CALL + 1:
                flat[5 * 1 + 1] = 4  # rank 1 called with 4 rows
            return flat

    library = Ahead([7, 8, 8, 8], LEFT, 1)
    text = flight.sentence(library, 1, "tp", 0, 4)
    assert text.startswith("tp, channel 0, call 7, rank 0: call mismatch in call 8: ")
    assert "rank 1 called all_reduce_rmsnorm, 4 x 7168 bfloat16" in text
    assert "rank 2 called all_reduce_rmsnorm, 16 x 7168 bfloat16" in text
