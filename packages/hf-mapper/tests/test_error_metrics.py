"""Against numbers worked out by hand."""

from __future__ import annotations

import pytest

from hf_mapper.measurements.error_metrics import compute_bias, compute_mape, compute_regret, compute_spearman


def test_mape_and_bias_are_means_of_relative_errors() -> None:
    """+10 %, -20 %, exact, +50 %."""
    predicted, measured = [1.1, 1.6, 3.0, 6.0], [1.0, 2.0, 3.0, 4.0]
    assert compute_mape(predicted, measured) == pytest.approx(0.2)
    assert compute_bias(predicted, measured) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        ([10.0, 20.0, 30.0, 40.0, 50.0], 1.0),
        ([50.0, 40.0, 30.0, 20.0, 10.0], -1.0),
        # Ranks 2 1 4 3 5: squared differences sum to 4, so 1 - 6 * 4 / (5 * 24).
        ([2.0, 1.0, 4.0, 3.0, 5.0], 0.8),
        # Ranks 1.5 1.5 3 4 5 against 1 to 5: covariance 9.5, variances 9.5 and 10.
        ([7.0, 7.0, 8.0, 9.0, 10.0], 9.5 / (9.5 * 10) ** 0.5),
    ],
)
def test_spearman_compares_ranks(predicted: list[float], expected: float) -> None:
    assert compute_spearman(predicted, [1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(expected)
    assert compute_spearman([1.0, 2.0, 3.0, 4.0, 5.0], predicted) == pytest.approx(expected)


def test_spearman_needs_two_different_values() -> None:
    assert compute_spearman([], []) is None
    assert compute_spearman([1.0], [2.0]) is None
    assert compute_spearman([1.0, 1.0], [2.0, 3.0]) is None


def test_regret_is_what_the_predicted_best_costs() -> None:
    assert compute_regret([3.0, 1.0, 2.0], [10.0, 12.0, 11.0]) == pytest.approx(0.2)
    assert compute_regret([30.0, 31.0, 32.0], [10.0, 12.0, 11.0]) == 0
    assert compute_regret([1.0, 1.0], [3.0, 2.0]) == pytest.approx(0.5), "of equal predictions the first"
