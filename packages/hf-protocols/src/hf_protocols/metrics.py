"""Metrics of micro-batches, ranks and updates, brought together by one rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["merge_metrics"]


def merge_metrics(parts: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Pairs of (sum, count) by name, to be divided once all have come.

    Sums are added and counts are; of a name that ends in `_max` the pair with the largest quotient is kept. A pair
    whose count is zero says nothing of a largest; one that is not a number stays, as it would in a sum.
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
