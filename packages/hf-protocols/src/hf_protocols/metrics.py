"""Metrics of micro-batches, ranks and updates, brought together by one rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["merge_metrics"]


def merge_metrics(parts: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Merges pairs of (sum, count) by name, which are divided at the end.

    Sums and counts are added. For names that end in `_max` the pair with the largest quotient is kept: pairs with a
    count of zero are ignored, and NaN is kept, as it would be in a sum.
    """
    merged: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (value, count) in part.items():
            before, counted = merged.get(name, (0.0, 0.0))
            if not name.endswith("_max"):
                merged[name] = (before + value, counted + count)
            elif not counted or (count and not value / count <= before / counted and before == before):
                merged[name] = (value, count)
    return merged
