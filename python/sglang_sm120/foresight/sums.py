"""How long one all-reduce takes at each number of rows: simulated, or measured at a few points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

Microseconds = Callable[[int], float]


class SumsError(ValueError):
    """Measured points contradict themselves; the text names them."""


def parse_points(text: str) -> dict[int, float]:
    """ "1=59,4=205" -> {1: 59.0, 4: 205.0}: microseconds by rows.

    Raises:
        SumsError: a part is not rows=microseconds with positive numbers.
    """
    out: dict[int, float] = {}
    for part in text.split(","):
        rows, sign, us = part.partition("=")
        try:
            point = (int(rows), float(us))
        except ValueError:
            point = (0, 0.0)
        if not sign or point[0] < 1 or point[1] <= 0:
            raise SumsError(f"{part!r} is not ROWS=MICROSECONDS, for example 4=205")
        out[point[0]] = point[1]
    return out


def measured(points: Mapping[int, float], healthy: Microseconds) -> Microseconds:
    """Microseconds for any number of rows from measurements at some.

    Between and beyond two or more points: straight lines, never below the smallest point. From a single point:
    what the machine adds to a healthy one's time is a matter of bandwidth (collapsed writes, staging), so the excess
    over `healthy` grows with the rows; a point below `healthy` scales the whole curve.
    """
    if not points:
        raise SumsError("no measured points")
    known = sorted(points.items())
    if len(known) == 1:
        at, us = known[0]
        base = healthy(at)
        if us <= base:
            return lambda rows: healthy(rows) * us / base
        return lambda rows: healthy(rows) + (us - base) * rows / at
    xs, ys = [float(r) for r, _ in known], [us for _, us in known]
    floor = min(ys)

    def line(rows: int) -> float:
        i = min(max(bisect_left(xs, rows), 1), len(xs) - 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return max(floor, ys[i - 1] + slope * (rows - xs[i - 1]))

    return line
