"""Errors of predictions against measurements, and the quality of the choices made by them.

MAPE and search quality disagree in practice: a simulator that is 20 % fast everywhere ranks perfectly, and one that is
5 % off at random may choose the wrong layout. So both are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["compute_bias", "compute_mape", "compute_regret", "compute_spearman"]

Numbers = Sequence[float] | NDArray[np.float64]


def compute_mape(predicted: Numbers, measured: Numbers) -> float:
    """Mean of abs(predicted / measured - 1), a fraction."""
    return float(np.abs(_errors(predicted, measured)).mean())


def compute_bias(predicted: Numbers, measured: Numbers) -> float:
    """Mean of predicted / measured - 1, a fraction; above 0 where predictions are slow."""
    return float(_errors(predicted, measured).mean())


def compute_spearman(predicted: Numbers, measured: Numbers) -> float | None:
    """The rank correlation, ties at their mean rank; None for fewer than two values or where one side is constant."""
    if len(predicted) < 2:
        return None
    left, right = _ranks(np.asarray(predicted, dtype=float)), _ranks(np.asarray(measured, dtype=float))
    left, right = left - left.mean(), right - right.mean()
    scale = float(np.sqrt((left**2).sum() * (right**2).sum()))
    return float((left * right).sum() / scale) if scale else None


def compute_regret(predicted: Numbers, measured: Numbers) -> float:
    """Measured time of the predicted best over the measured best, minus 1; of equal predictions the first counts."""
    chosen = int(np.argmin(np.asarray(predicted, dtype=float)))
    return float(measured[chosen] / min(measured) - 1)


def _errors(predicted: Numbers, measured: Numbers) -> NDArray[np.float64]:
    errors: NDArray[np.float64] = np.asarray(predicted, dtype=float) / np.asarray(measured, dtype=float) - 1
    return errors


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[group]
    return ranks
