"""Numbers that show early that a run goes wrong, each against the band of its first iterations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_algorithms.report._decimation import decimate

__all__ = ["HealthNumber", "measure_health"]

_WATCHED = {
    "KL to the reference": ("kl/k3",),
    "entropy": ("actor/entropy",),
    "clipped": ("actor/clip_low", "actor/clip_high"),
    "mismatch k3": ("rollout/mismatch_k3",),
    "truncated": ("response/truncated",),
    "equal groups": ("group/zero_variance",),
    "unscorable": ("reward/unscorable",),
    "gradient norm": ("actor/grad_norm",),
}
"""By what the reader sees; several metrics are added."""
_FIRST, _LAST = 20, 5
_MOST_POINTS = 80
_WIDTH = 3.0
"""Standard deviations between the mean and an edge of the band."""


@dataclass(frozen=True, kw_only=True)
class HealthNumber:
    """One number of the health row.

    Attributes:
        name: what the reader sees.
        metrics: that it is formed of.
        points: its course, in few points.
        last: mean of the last values.
        band: of the first iterations; None before there are enough.
    """

    name: str
    metrics: Sequence[str]
    points: Sequence[tuple[float, float]]
    last: float
    band: tuple[float, float] | None

    @property
    def state(self) -> str:
        """Reports `above` or `below` the band, `within` it, or an empty string without one."""
        if self.band is None:
            return ""
        return "below" if self.last < self.band[0] else "above" if self.last > self.band[1] else "within"


def measure_health(columns: Mapping[str, Sequence[float]]) -> list[HealthNumber]:
    """Returns the numbers whose metrics the run has.

    The band is three standard deviations around the mean of the first 20 values; the last five values are the present.
    """
    found = []
    for name, metrics in _WATCHED.items():
        known = [columns[metric] for metric in metrics if metric in columns]
        values = known[0] if len(known) == 1 else list(map(math.fsum, zip(*known, strict=True)))
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            found.append(
                HealthNumber(
                    name=name,
                    metrics=metrics,
                    points=decimate(range(len(values)), values, _MOST_POINTS).points,
                    last=statistics.fmean(finite[-_LAST:]),
                    band=_measure_band(finite),
                )
            )
    return found


def _measure_band(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < _FIRST + _LAST:
        return None
    mean, spread = statistics.fmean(values[:_FIRST]), _WIDTH * statistics.pstdev(values[:_FIRST])
    # of a constant number, rounding is not a change
    margin = max(spread, 1e-9 * abs(mean))
    return mean - margin, mean + margin
