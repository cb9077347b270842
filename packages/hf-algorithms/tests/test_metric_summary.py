"""avg@K and pass@K against the enumeration of every choice of responses."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import NormalDist, fmean, stdev

import pytest

from hf_algorithms.evaluation.metric_summary import (
    compute_mean_interval,
    compute_pass_at_k,
    compute_wilson_interval,
    summarize_scores,
)
from hf_protocols import ConfigError


@pytest.mark.parametrize("num_samples", range(1, 7))
def test_pass_at_k_is_the_share_of_choices_with_a_correct_one(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        responses = [1] * num_correct + [0] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            chosen = [any(responses[number] for number in each) for each in combinations(range(num_samples), k)]
            assert compute_pass_at_k(num_samples, num_correct, k) == pytest.approx(sum(chosen) / len(chosen))


def test_pass_at_k_of_many_samples_is_finite() -> None:
    expected = 1 - math.prod((5000 - 10 - number) / (5000 - number) for number in range(1000))
    assert compute_pass_at_k(5000, 10, 1000) == pytest.approx(expected)


@pytest.mark.parametrize(("num_samples", "num_correct", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_of_impossible_numbers_is_refused(num_samples: int, num_correct: int, k: int) -> None:
    with pytest.raises(ConfigError, match=f"k={k}, num_correct={num_correct}, num_samples={num_samples}"):
        compute_pass_at_k(num_samples, num_correct, k)


def test_a_summary_has_means_over_rows() -> None:
    found = summarize_scores([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0.5, 1, 0, 0], [1, math.nan, 1, 1]])
    assert found is not None
    assert (found.rows, found.unscorable) == (4, 1)
    assert found.mean == pytest.approx((0.5 + 0 + 1 + 0.375) / 4)
    # Of 2, 0, 4 and 1 correct ones; a half is not correct.
    assert found.pass_at == pytest.approx({1: 7 / 16, 2: (5 / 6 + 0 + 1 + 1 / 2) / 4, 4: 3 / 4})
    assert found.to_metrics().keys() == {"", "/avg@4", "/pass@1", "/pass@2", "/pass@4"}
    assert found.interval == compute_wilson_interval(1.875, 4)


def test_scores_beyond_one_have_no_pass_at_k() -> None:
    found = summarize_scores([[2.0, 0.0], [-1.0, 4.0]])
    assert found is not None
    assert found.to_metrics() == {"": 1.25, "/avg@2": 1.25}
    assert (found.least, found.largest) == (-1.0, 4.0)


def test_no_row_with_scores_has_no_summary() -> None:
    assert summarize_scores([[math.nan, 1.0], [math.nan, math.nan]]) is None


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    values = [3.0, -1.0, 2.0, 8.0]
    half = NormalDist().inv_cdf(0.975) * stdev(values) / 2
    assert compute_mean_interval(values) == pytest.approx((fmean(values) - half, fmean(values) + half))
    assert compute_mean_interval([3.0]) is compute_mean_interval([1.0]) is None
    with pytest.raises(ConfigError, match="trials must be at least 1"):
        compute_mean_interval([])
