"""Points that no other point beats in every coordinate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["find_frontier"]

_FEW = 64
"""Points up to which all pairs are compared at once; of more, the comparisons would take too much memory."""


def find_frontier(points: NDArray[np.float64]) -> NDArray[np.intp]:
    """Rows of `points` `[M, D]` that no other row undercuts or equals in all coordinates; of equal rows the first.

    The answer is in lexicographic order of the points.
    """
    order = np.lexsort(points.T[::-1])
    if order.size <= _FEW:
        ordered = points[order]
        beats = (ordered[:, None] <= ordered).all(axis=2)
        return order[~np.triu(beats, k=1).any(axis=0)]
    kept: list[np.intp] = []
    while order.size:
        best = order[0]
        kept.append(best)
        order = order[(points[order] < points[best]).any(axis=1)]
    return np.array(kept, dtype=np.intp)
