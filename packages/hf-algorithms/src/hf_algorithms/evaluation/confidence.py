"""Intervals of a share that was counted on a sample, and of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

from hf_protocols import ConfigError

__all__ = ["compute_mean_interval", "compute_wilson_interval"]


def compute_wilson_interval(successes: float, trials: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Returns the lower and upper bound of a share by Wilson (1927), eq. 5.

    Args:
        successes: of the trials; a half counts as one, such as that of a tie.
        trials: independent of each other.
        confidence: of the interval, both sides together.

    Raises:
        ConfigError: for no trials, more successes than trials, or a confidence that is not between 0 and 1.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ConfigError(
            f"successes={successes}, trials={trials}: trials must be at least 1, and successes from 0 to trials"
        )
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence}: must be above 0 and below 1")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = successes / trials, z * z / trials
    center = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    # Rounding would leave the bounds of 0 and of all successes a hair off.
    low = 0.0 if successes == 0 else center - half
    return low, 1.0 if successes == trials else center + half


def compute_mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float] | None:
    """Returns the lower and upper bound of the mean of independent values; None for a single one.

    Values from 0 to 1 are counted as shares of a success (`compute_wilson_interval`): their variance is at most that of
    zeros and ones, so the interval is too wide rather than too narrow. Others have the normal interval of their
    standard deviation.

    Args:
        values: finite, at least one.
        confidence: of the interval, both sides together.

    Raises:
        ConfigError: for no values, or a confidence that is not between 0 and 1.
    """
    if not values or (min(values) >= 0 and max(values) <= 1):
        found = compute_wilson_interval(math.fsum(values), len(values), confidence=confidence)
        return found if len(values) > 1 else None
    if len(values) == 1:
        return None
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence}: must be above 0 and below 1")
    half = NormalDist().inv_cdf((1 + confidence) / 2) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half
