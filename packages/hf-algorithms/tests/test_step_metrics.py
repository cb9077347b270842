"""Averages of the metrics of one iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hf_algorithms.recipes import StepError
from hf_algorithms.run.step_metrics import average_metrics, describe_failures, describe_unscorable


def pair(*values: float) -> tuple[float, float]:
    return sum(values), float(len(values))


def average(parts: Sequence[Mapping[str, tuple[float, float]]], *own: Mapping[str, float]) -> dict[str, float]:
    calls: list[Any] = [SimpleNamespace(sums=lambda part=part: part) for part in parts]
    return average_metrics("mine", [*calls, *own])


def test_unequal_mini_batches_average_over_all_of_their_tokens() -> None:
    parts = [
        {"actor/entropy": pair(1.0), "gap_max": (3.0, 1.0)},
        {"actor/entropy": pair(4.0, 4.0, 4.0), "gap_max": (2.0, 1.0)},
    ]
    found = average([*parts, {"nothing": (0.0, 0.0)}], {"group/refills": 2.0})
    assert found == {"actor/entropy": 13 / 4, "gap_max": 3.0, "group/refills": 2.0}


@pytest.mark.parametrize("sizes", [(6,), (1, 5), (2, 1, 3)])
def test_explained_variance_is_that_of_all_tokens(sizes: tuple[int, ...]) -> None:
    returns, values = np.random.default_rng(0).normal(size=(2, 6))
    bounds = np.cumsum([0, *sizes])
    parts = [
        {
            "critic/returns_mean": pair(*returns[start:end]),
            "critic/returns_square": pair(*returns[start:end] ** 2),
            "critic/error_mean": pair(*(returns - values)[start:end]),
            "critic/squared_error": pair(*((returns - values)[start:end] ** 2)),
        }
        for start, end in pairwise(bounds)
    ]
    wanted = 1 - (returns - values).var() / returns.var()
    assert average(parts) == pytest.approx({"critic/explained_variance": wanted}, rel=1e-12)


def test_a_number_does_not_share_its_name_with_a_metric() -> None:
    """Their mean would be neither: a reward of 1.5 was reported as 1.8."""
    with pytest.raises(StepError, match=r"^the step of 'mine' returned a metric named 'reward/mean', which an"):
        average([{"reward/mean": pair(1.0, 2.0)}], {"other": 1.0, "reward/mean": 7.0})
    with pytest.raises(StepError, match="named 'other'"):
        average([], {"other": 1.0}, {"other": 2.0})


def test_calls_that_were_ended_are_named_by_their_function() -> None:
    metrics = {"reward/mean": 0.5, "reward/slow/failed": 2.0, "reward/good/failed": 0.0, "cost/bad/failed": 1.0}
    said = describe_failures(7, metrics)
    assert said.keys() == {"reward/slow/failed", "cost/bad/failed"}
    assert said["reward/slow/failed"].startswith("warning: in iteration 7 2 responses have no score by slow, whose")
    assert describe_failures(7, {name: metrics[name] for name in metrics if name != "reward/mean"}) == {}
    assert "calls of slow (2 responses) met deadline_s" in describe_unscorable(7, metrics)
