"""The interval of a share against its definition, solved by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import pytest

from hf_algorithms.evaluation.metric_summary import compute_wilson_interval
from hf_protocols import ConfigError


def bisect(is_low: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low


@pytest.mark.parametrize(("successes", "trials"), [(0, 5), (1, 5), (2.5, 5), (5, 5), (71, 100), (999, 1000)])
def test_bounds_are_those_that_a_score_test_accepts(successes: float, trials: int) -> None:
    """A share p is inside if the observed one is at most z standard deviations of p away."""
    z, observed = NormalDist().inv_cdf(0.975), successes / trials

    def is_inside(share: float) -> bool:
        return abs(observed - share) <= z * math.sqrt(share * (1 - share) / trials)

    low = bisect(lambda share: not is_inside(share), 0.0, observed)
    high = bisect(is_inside, observed, 1.0)
    assert compute_wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-9)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (3, 2), (-1, 2)])
def test_impossible_counts_are_refused(successes: int, trials: int) -> None:
    with pytest.raises(ConfigError):
        compute_wilson_interval(successes, trials)
