"""What one speculative pass costs: warm-up timings first, corrected by the passes that were served.

A pass of `steps` drafts at `batch` requests is draft + verify + draft-extend + the seams between them.
Each (steps, batch) cell splits its time into a fixed part (compute) and a part that stretches with the
fabric (communication, from the plan). A cell that was not run lately is carried along with the cells
that were: when passes get slower, the slowdown is laid on the stretching part.

The table on rank 0 is the only one that decisions may use; `agree.py` distributes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

# The step count under which a pass without drafts and without draft-extend is filed: a plain step.
COLD = -1
# A pass longer than this times the cell's median is a prefill, a pause or a profiler, not a pass.
OUTLIER = 1.6
RECENT = 5
# A cell seen within this many passes shows how the machine changes; an older one shows only itself.
FRESH = 8
# After this many passes without a visit a cell's level rests on half as many observations.
STALE = 64


class StageTimes(msgspec.Struct, frozen=True):
    """Warm-up timings of one captured shape, in milliseconds.

    Attributes:
        steps: drafts per request.
        batch: requests.
        draft_ms: the draft graph (all steps); 0 for steps = 0.
        verify_ms: the target's verify graph over batch * (steps + 1) rows.
        extend_ms: the draft-extend graph.
        seam_ms: host work between the graphs that the GPU waits for.
        comm_ms: the part of the sum that is communication, from the plan; 0 when unknown.
    """

    steps: int
    batch: int
    draft_ms: float
    verify_ms: float
    extend_ms: float
    seam_ms: float = 0.0
    comm_ms: float = 0.0

    @property
    def pass_ms(self) -> float:
        """Length of the whole pass in milliseconds."""
        return self.draft_ms + self.verify_ms + self.extend_ms + self.seam_ms


class Cell(msgspec.Struct, array_like=True):
    """One (steps, batch) entry: predicted = fixed + stretch * level * (global level / level then)."""

    steps: int
    batch: int
    fixed_ms: float
    stretch_ms: float
    level: float = 1.0
    level_then: float = 1.0
    seen: int = 0
    # How many recent passes the level rests on, and when (in passes of any shape) it was last seen.
    weight: float = 0.0
    last: int = 0


class CostTable(msgspec.Struct, array_like=True):
    """A complete, serialisable state of the cost model; equal tables give equal predictions.

    Attributes:
        cells: sorted by (steps, batch), at least one.
        level: how slow the fabric is now, relative to warm-up.
    """

    cells: list[Cell]
    level: float = 1.0

    def copy(self) -> CostTable:
        """An independent table: the model goes on changing its own."""
        return load_table(msgspec.msgpack.encode(self))

    def _row(self, steps: int) -> list[Cell]:
        return [cell for cell in self.cells if cell.steps == steps]

    def _predict(self, cell: Cell, optimistic: bool) -> float:
        drift = self.level / cell.level_then
        if optimistic:
            # A cell nobody ran since the machine slowed down may have stayed fast.
            drift = min(1.0, drift)
        return cell.fixed_ms + cell.stretch_ms * cell.level * drift

    def pass_ms(self, steps: int, batch: int, *, optimistic: bool = False) -> float:
        """Predicted milliseconds of one pass.

        Batches between two known ones are interpolated, beyond the last extrapolated by its slope;
        a step count that was never timed is interpolated between its neighbours.

        Args:
            steps: drafts per request, >= 0, or COLD.
            batch: requests, >= 1.
            optimistic: assume that a slowdown seen elsewhere did not touch this cell.
        """
        row = self._row(steps)
        if row:
            return _interpolate(
                batch, [c.batch for c in row], [self._predict(c, optimistic) for c in row]
            )
        known = sorted({cell.steps for cell in self.cells})
        values = [self.pass_ms(s, batch, optimistic=optimistic) for s in known]
        return _interpolate(steps, known, values)

    def seen(self, steps: int, batch: int) -> int:
        """How many served passes the nearest cell at or above `batch` has behind it."""
        row = self._row(steps)
        if not row:
            return 0
        at = min(bisect_left([c.batch for c in row], batch), len(row) - 1)
        return row[at].seen


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    if len(xs) == 1:
        return ys[0]
    right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    value = ys[left] + slope * (x - xs[left])
    # Extrapolation must not turn a falling slope into a free or negative pass.
    return max(value, 0.5 * min(ys))


def _with_cold(timings: Iterable[StageTimes]) -> list[StageTimes]:
    """Add the plain step that follows from each zero-step timing: the same without draft-extend."""
    found = list(timings)
    given = {(t.steps, t.batch) for t in found}
    plain = [
        msgspec.structs.replace(
            t,
            steps=COLD,
            extend_ms=0.0,
            comm_ms=t.comm_ms * (t.pass_ms - t.extend_ms) / t.pass_ms,
        )
        for t in found
        if t.steps == 0 and t.extend_ms > 0 and (COLD, t.batch) not in given
    ]
    return found + plain


class CostModel:
    """Keeps a `CostTable` current from served passes. Lives where decisions are made (rank 0).

    Args:
        timings: warm-up timings, any order, at least one.
        smoothing: weight of a new pass in its cell.
        guessed: the timings are only proportions (see `guess`): the first passes set the scale of all.

    Raises:
        ValueError: no timings, a non-positive pass, or a shape given twice.
    """

    def __init__(
        self, timings: Iterable[StageTimes], *, smoothing: float = 0.12, guessed: bool = False
    ) -> None:
        self.timings = sorted(_with_cold(timings), key=lambda t: (t.steps, t.batch))
        if not self.timings:
            raise ValueError("the cost model needs at least one warm-up timing")
        cells: list[Cell] = []
        for time in self.timings:
            if time.pass_ms <= 0 or time.comm_ms < 0 or time.comm_ms > time.pass_ms:
                raise ValueError(f"impossible warm-up timing {time}")
            if cells and (cells[-1].steps, cells[-1].batch) == (time.steps, time.batch):
                raise ValueError(f"two warm-up timings for {time.steps} steps at {time.batch}")
            stretch = time.comm_ms or time.pass_ms
            cells.append(Cell(time.steps, time.batch, time.pass_ms - stretch, stretch))
        self.table = CostTable(cells)
        self._smoothing = smoothing
        self._guessed = guessed
        self._recent: dict[tuple[int, int], deque[float]] = {}
        self.passes = 0
        self.rejected = 0

    def _cell(self, steps: int, batch: int) -> Cell:
        """The cell of a served shape; made from a prediction when warm-up did not time it."""
        for cell in self.table.cells:
            if (cell.steps, cell.batch) == (steps, batch):
                return cell
        level = self.table.level
        cell = Cell(steps, batch, 0.0, self.table.pass_ms(steps, batch), 1.0, level)
        self.table.cells.append(cell)
        self.table.cells.sort(key=lambda c: (c.steps, c.batch))
        return cell

    def observe(self, steps: int, batch: int, pass_ms: float) -> None:
        """Take in one served pass.

        The first passes of a cell, or the first after a long absence, move it quickly, later ones are
        smoothed. A pass more than `OUTLIER` times the median of the last few is dropped. A cell that is
        visited steadily also moves the fabric's level, which carries the cells that are not.

        Args:
            steps: drafts per request.
            batch: requests as padded to the captured shape, so that cells are hit again.
            pass_ms: start of this pass to start of the next, milliseconds, > 0.
        """
        if not pass_ms > 0:
            raise ValueError(f"a pass of {steps} steps at batch {batch} took {pass_ms} ms")
        cell = self._cell(steps, batch)
        self.passes += 1
        recent = self._recent.setdefault((steps, batch), deque(maxlen=RECENT))
        recent.append(pass_ms)
        if len(recent) > 2 and pass_ms > OUTLIER * sorted(recent)[(len(recent) - 1) // 2]:
            self.rejected += 1
            return
        age = self.passes - cell.last
        steady = cell.weight >= FRESH and age <= FRESH
        # Before it is seen a cell counts for one observation: a single slow pass moves it half way.
        cell.weight = cell.weight / (1.0 + age / STALE) + 1.0
        before = cell.level * (self.table.level / cell.level_then)
        level = max(0.05, (pass_ms - cell.fixed_ms) / cell.stretch_ms)
        cell.level = before + max(self._smoothing, 1.0 / (cell.weight + 1.0)) * (level - before)
        if steady or (self._guessed and self.passes <= FRESH):
            self.table.level *= cell.level / before
        cell.level_then = self.table.level
        cell.last = self.passes
        cell.seen += 1

    def snapshot(self) -> bytes:
        """The table as msgpack, to be sent to the other ranks."""
        return msgspec.msgpack.encode(self.table)


def guess(candidates: Iterable[int], batches: Iterable[int]) -> list[StageTimes]:
    """Proportions for a machine that was not timed: a draft costs 6 % of a plain step, so does
    draft-extend, and a row more in the verify pass 3 %. The scale is arbitrary; see `CostModel.guessed`.
    """
    out = []
    steps_list = sorted(set(candidates))
    for batch in sorted(set(batches)):
        plain = 10.0 * (1.0 + 0.03 * batch)
        for steps in steps_list:
            out.append(
                StageTimes(
                    steps=steps,
                    batch=batch,
                    draft_ms=0.6 * max(0, steps - 1),
                    verify_ms=plain + 0.3 * batch * steps,
                    extend_ms=0.6,
                )
            )
    return out


def load_table(data: bytes) -> CostTable:
    """Decode `CostModel.snapshot`.

    Raises:
        msgspec.DecodeError: the bytes are not a table.
    """
    return msgspec.msgpack.decode(data, type=CostTable)
