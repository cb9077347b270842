"""The controller of the KL coefficient."""

from __future__ import annotations

import math

import pytest

from hf_algorithms.kl import AdaptiveKL
from hf_protocols import ConfigError


@pytest.mark.parametrize(
    ("observed", "wanted"),
    [(6.0, 0.2), (6.6, 0.2 * (1 + 0.1 * 0.05)), (60.0, 0.2 * (1 + 0.2 * 0.05)), (0.0, 0.2 * (1 - 0.2 * 0.05))],
)
def test_adaptive_kl_moves_towards_its_target(observed: float, wanted: float) -> None:
    """512 of 10,240 sequences: a twentieth of the horizon; the error is cut at a fifth."""
    assert AdaptiveKL(target=6.0, horizon=10_240).update(0.2, observed, 512) == pytest.approx(wanted, rel=1e-12)


def test_adaptive_kl_finds_the_coefficient_of_its_target() -> None:
    """With a KL of 0.3 / coefficient, a target of 1.5 is met at 0.2."""
    controller, coefficient = AdaptiveKL(target=1.5, horizon=1_000), 1.0
    for _ in range(600):
        coefficient = controller.update(coefficient, 0.3 / coefficient, 50)
    assert coefficient == pytest.approx(0.2, rel=1e-6)


def test_adaptive_kl_stays_finite_and_never_negative() -> None:
    controller = AdaptiveKL(target=1.0, horizon=1.0)
    assert controller.update(0.1, 0.0, 1_000) == 0.0
    assert controller.update(0.1, math.nan, 1_000) == 0.1
    assert controller.update(0.1, -5.0, 1) == pytest.approx(0.08)
    assert math.isfinite(controller.update(0.1, math.inf, 1))


def test_adaptive_kl_refuses_values_out_of_range() -> None:
    with pytest.raises(ConfigError, match=r"kl_target=0\.0"):
        AdaptiveKL(target=0.0)
    with pytest.raises(ConfigError, match="kl_horizon=-1"):
        AdaptiveKL(target=1.0, horizon=-1)
