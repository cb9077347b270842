"""Numbers of one metric over the rows of a set: its mean, pass@k, and intervals of means and shares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any

from hf_protocols import ConfigError

__all__ = [
    "CORRECT",
    "MetricSummary",
    "compute_mean_interval",
    "compute_pass_at_k",
    "compute_wilson_interval",
    "summarize_scores",
]

_CONFIDENCE = 0.95
"""Of an interval, both sides together."""


def compute_wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Returns the lower and upper bound of a share's 95 % interval by Wilson (1927), eq. 5.

    Args:
        successes: of the trials; a half counts as one, such as that of a tie.
        trials: independent of each other.

    Raises:
        ConfigError: for no trials, or more successes than trials.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ConfigError(
            f"successes={successes}, trials={trials}: trials must be at least 1, and successes from 0 to trials"
        )
    z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    share, spread = successes / trials, z * z / trials
    center = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    # Rounding would leave the bounds of 0 and of all successes a hair off.
    low = 0.0 if successes == 0 else center - half
    return low, 1.0 if successes == trials else center + half


def compute_mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the lower and upper bound of the 95 % interval of independent values' mean; None for a single value.

    Values from 0 to 1 are counted as shares of a success (`compute_wilson_interval`): their variance is at most that of
    zeros and ones, so the interval is too wide rather than too narrow. Others have the normal interval of their
    standard deviation.

    Args:
        values: finite, at least one.

    Raises:
        ConfigError: for no values.
    """
    if not values or (min(values) >= 0 and max(values) <= 1):
        found = compute_wilson_interval(math.fsum(values), len(values))
        return found if len(values) > 1 else None
    if len(values) == 1:
        return None
    half = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


CORRECT = 1.0
"""A response with at least this score counts as correct in pass@k."""

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class MetricSummary:
    """One metric of one set.

    Attributes:
        rows: that count.
        unscorable: rows that do not count, because a response to them has no score.
        samples: responses to each row.
        mean: over rows, of the mean over a row's responses: avg@K.
        interval: 95 % of the mean, rows being independent; None for a single row.
        pass_at: by k, the chance that at least one of k responses is correct. Empty with one response to each row,
            and for scores that are not from 0 to 1.
        pass_intervals: 95 % of each.
        least: smallest score.
        largest: largest score.
    """

    rows: int
    unscorable: int
    samples: int
    mean: float
    interval: Interval | None
    pass_at: Mapping[int, float]
    pass_intervals: Mapping[int, Interval | None]
    least: float
    largest: float

    def to_metrics(self) -> dict[str, float]:
        """The numbers by the end of their name: an empty one for the mean, `/avg@K`, `/pass@K`."""
        if self.samples == 1:
            return {"": self.mean}
        passes = {f"/pass@{k}": value for k, value in self.pass_at.items()}
        return {"": self.mean, f"/avg@{self.samples}": self.mean, **passes}

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON has it."""
        body: dict[str, Any] = {
            "rows": self.rows,
            "unscorable": self.unscorable,
            "mean": self.mean,
            "interval": self.interval,
        }
        if self.samples > 1:
            body[f"avg@{self.samples}"] = self.mean
        for k, value in self.pass_at.items():
            body |= {f"pass@{k}": value, f"pass@{k}_interval": self.pass_intervals[k]}
        return body


def compute_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the unbiased estimate of the chance that one of k responses is correct (Chen et al. 2021, eq. 1).

    It is 1 - C(n - c, k) / C(n, k): the share of all choices of k of the n responses that hold a correct one.

    Args:
        num_samples: n, responses that were drawn.
        num_correct: c, those of them that are correct.
        k: at most n.

    Raises:
        ConfigError: for a k that is not from 1 to n, or a c that is not from 0 to n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ConfigError(
            f"k={k}, num_correct={num_correct}, num_samples={num_samples}: k must be from 1 to num_samples, and "
            "num_correct from 0 to num_samples"
        )
    choices = math.comb(num_samples, k)
    return (choices - math.comb(num_samples - num_correct, k)) / choices


def summarize_scores(scores: Sequence[Sequence[float]]) -> MetricSummary | None:
    """Returns the numbers of a metric; None if no row counts.

    Args:
        scores: of every row those of its responses, as many for each row; NaN for a response without a score. A row
            with such a response does not count.
    """
    known = [row for row in scores if not any(map(math.isnan, row))]
    if not known:
        return None
    num_samples = len(known[0])
    means = [math.fsum(row) / num_samples for row in known]
    least, largest = min(map(min, known)), max(map(max, known))
    passes: dict[int, list[float]] = {}
    if num_samples > 1 and least >= 0 and largest <= CORRECT:
        correct = [sum(score >= CORRECT for score in row) for row in known]
        passes = {k: [compute_pass_at_k(num_samples, each, k) for each in correct] for k in _list_ks(num_samples)}
    return MetricSummary(
        rows=len(known),
        unscorable=len(scores) - len(known),
        samples=num_samples,
        mean=math.fsum(means) / len(means),
        interval=compute_mean_interval(means),
        pass_at={k: math.fsum(each) / len(each) for k, each in passes.items()},
        pass_intervals={k: compute_mean_interval(each) for k, each in passes.items()},
        least=least,
        largest=largest,
    )


def _list_ks(num_samples: int) -> Iterator[int]:
    """Yields the powers of two below the number of samples, and that number."""
    k = 1
    while k < num_samples:
        yield k
        k *= 2
    yield num_samples
