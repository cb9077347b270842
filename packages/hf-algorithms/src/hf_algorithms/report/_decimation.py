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
    if not (_are_finite(xs) and _are_finite(ys)):
        rows = [row for row, value in enumerate(ys) if math.isfinite(value) and math.isfinite(xs[row])]
        xs, ys = [xs[row] for row in rows], [ys[row] for row in rows]
    if len(ys) <= limit:
        return Decimated(list(zip(xs, ys, strict=True)), [])
    width = math.ceil(len(ys) / (limit // 2))
    kept: list[int] = []
    means: list[Point] = []
    for start in range(0, len(ys), width):
        # of an array, a slice and its extremes take a hundredth of the time of a loop over its values
        values = ys[start : start + width]
        kept += sorted({start + values.index(min(values)), start + values.index(max(values))})
        means.append((xs[start + len(values) // 2], math.fsum(values) / len(values)))
    if kept[-1] != len(ys) - 1:
        kept.append(len(ys) - 1)
    return Decimated([(xs[row], ys[row]) for row in kept], means)


def _are_finite(values: Sequence[float]) -> bool:
    try:
        return math.isfinite(math.fsum(values))
    except (OverflowError, ValueError):  # infinities, or values whose sum no float holds
        return False
