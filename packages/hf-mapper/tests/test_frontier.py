from __future__ import annotations

import numpy as np
import pytest

from hf_mapper.search.frontier import find_frontier


@pytest.mark.parametrize("seed", range(20))
def test_frontier_is_what_pairwise_comparison_leaves(seed: int) -> None:
    random = np.random.default_rng(seed)
    points = random.integers(0, 5, size=(random.integers(1, 130), random.integers(1, 5))).astype(float)
    expected = {
        tuple(point)
        for point in points
        if not any((other <= point).all() and (other < point).any() for other in points)
    }
    kept = [tuple(points[row]) for row in find_frontier(points)]
    assert set(kept) == expected
    assert len(kept) == len(set(kept))
    assert kept == sorted(kept)


def test_of_equal_points_the_first_stays() -> None:
    assert find_frontier(np.array([[2.0, 1.0], [1.0, 1.0], [1.0, 1.0]])).tolist() == [1]
    assert find_frontier(np.array([[2.0, 1.0], *[[1.0, 1.0]] * 99])).tolist() == [1]


def test_nothing_has_an_empty_frontier() -> None:
    assert find_frontier(np.empty((0, 3))).tolist() == []
