"""A curve of any length in a bounded number of points, with its extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Decimated", "decimate"]

Point = tuple[float, float]


class Decimated(NamedTuple):
    """Points of a curve, finite ones only.

    Attributes:
        points: all of them, or of each stretch the least and the largest.
        means: one point a stretch, its mean; empty where all points are there.
    """

    points: list[Point]
    means: list[Point]


def decimate(xs: Sequence[float], ys: Sequence[float], limit: int) -> Decimated:
    """Returns at most `limit + 1` points: of each stretch the least and the largest value, and the last point.

    Args:
        xs: in any unit.
        ys: as many; where one is not finite, there is no point.
        limit: at least 2.
    """
    known = [row for row, value in enumerate(ys) if math.isfinite(value) and math.isfinite(xs[row])]
    if len(known) <= limit:
        return Decimated([(xs[row], ys[row]) for row in known], [])
    width = math.ceil(len(known) / (limit // 2))
    rows: list[int] = []
    means: list[Point] = []
    for start in range(0, len(known), width):
        stretch = known[start : start + width]
        values = [ys[row] for row in stretch]
        least, largest = stretch[values.index(min(values))], stretch[values.index(max(values))]
        rows += sorted({least, largest})
        means.append((xs[stretch[len(stretch) // 2]], math.fsum(values) / len(values)))
    if rows[-1] != known[-1]:
        rows.append(known[-1])
    return Decimated([(xs[row], ys[row]) for row in rows], means)
