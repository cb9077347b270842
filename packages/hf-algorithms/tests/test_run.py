"""Settings that a run passes to its executor, and the averages of its metrics."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hf_algorithms import run


@pytest.mark.parametrize(("call_timeout_s", "longest_s"), [(600.0, 600.0), (5.0, 120.0)])
def test_workers_may_start_and_wait_for_each_other_as_long_as_a_call_may_take(
    call_timeout_s: float, longest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their constructors load models and engines; a short deadline of calls is not a deadline for that."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(run, "RayExecutor", lambda **options: given.update(options))
    cluster = SimpleNamespace(address="local", call_timeout_s=call_timeout_s)
    config: Any = SimpleNamespace(run=SimpleNamespace(executor="ray"), cluster=cluster)
    plan: Any = SimpleNamespace(pools=[SimpleNamespace(num_slots=2), SimpleNamespace(num_slots=1)])
    run.build_executor(config, plan)
    assert given == {
        "num_cpus": 3,
        "address": "local",
        "call_timeout_s": call_timeout_s,
        "start_timeout_s": longest_s,
        "collective_timeout_s": longest_s,
    }


def test_a_reward_without_scores_names_its_functions() -> None:
    ended = run.describe_unscorable(
        3, {"reward/slow/failed": 8.0, "reward/quick/failed": 0.0, "reward/unscorable": 8.0}
    )
    assert ended.endswith("could be scored: calls of slow (8 responses) met deadline_s or ended their process")
    assert run.describe_unscorable(3, {"reward/unscorable": 8.0}).endswith(": its functions returned None or NaN")


def pair(*values: float) -> tuple[float, float]:
    return sum(values), float(len(values))


def test_unequal_mini_batches_average_over_all_of_their_tokens() -> None:
    parts = [
        {"actor/entropy": pair(1.0), "gap_max": (3.0, 1.0)},
        {"actor/entropy": pair(4.0, 4.0, 4.0), "gap_max": (2.0, 1.0)},
    ]
    found = run.average_metrics([*parts, {"group/refills": (2.0, 1.0), "nothing": (0.0, 0.0)}])
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
    assert run.average_metrics(parts) == pytest.approx({"critic/explained_variance": wanted}, rel=1e-12)
