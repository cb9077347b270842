from __future__ import annotations

import random
from itertools import permutations
from math import isnan, nan

from hf_protocols import merge_metrics


def test_sums_are_added_and_a_largest_stays_in_any_order() -> None:
    parts: list[dict[str, tuple[float, float]]] = [
        {"loss": (3.0, 2.0), "gap_max": (0.5, 1.0)},
        {"loss": (1.0, 2.0), "gap_max": (6.0, 2.0), "only": (4.0, 1.0)},
        {"gap_max": (0.0, 0.0)},
        {},
        {"gap_max": (-8.0, 1.0)},
    ]
    for seed in range(20):
        random.Random(seed).shuffle(parts)
        assert merge_metrics(parts) == {"loss": (4.0, 4.0), "gap_max": (6.0, 2.0), "only": (4.0, 1.0)}
        half = merge_metrics(parts[:3])
        assert merge_metrics([half, *parts[3:]]) == merge_metrics(parts)


def test_negative_numbers_have_a_largest_too() -> None:
    assert merge_metrics([{"x_max": (-3.0, 1.0)}, {"x_max": (-2.0, 1.0)}]) == {"x_max": (-2.0, 1.0)}
    assert merge_metrics([{"x_max": (0.0, 0.0)}, {"x_max": (-2.0, 1.0)}]) == {"x_max": (-2.0, 1.0)}
    assert merge_metrics([]) == {}


def test_nan_stays_in_any_order() -> None:
    parts = [{"x_max": (0.5, 1.0)}, {"x_max": (nan, 1.0)}, {"x_max": (0.7, 1.0)}]
    for order in permutations(parts):
        assert isnan(merge_metrics(order)["x_max"][0])
