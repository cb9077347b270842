"""Safe-RLHF on a bandit with costs: the multiplier and the policy end where the constraint holds with equality."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hf_algorithms.recipes import SAFE_RLHF
from tabular_roles import FrozenPolicy, TableCritic, TablePolicy, TableReward, TableRun, Trained

REFERENCE = np.array([0.4, 0.3, 0.2, 0.1])
REWARDS = np.array([1.0, 0.7, 0.2, 0.0])
COSTS = np.array([1.0, 0.4, -0.5, -1.0])
START = [np.log(REFERENCE).tolist()]


def find_policy(multiplier: float, beta: float) -> np.ndarray:
    """reference exp((r - lambda c) / ((1 + lambda) beta)), normalised."""
    weights = REFERENCE * np.exp((REWARDS - multiplier * COSTS) / ((1 + multiplier) * beta))
    return weights / weights.sum()


def find_multiplier(beta: float, limit: float = 0.0) -> float:
    """The lambda at which the expected cost is the limit, by bisection."""
    low, high = 0.0, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if find_policy(middle, beta) @ COSTS > limit else (low, middle)
    return low


def train(*, beta: float, iterations: int, **algorithm: Any) -> Trained:
    workers: dict[str, Any] = {
        "actor": (TablePolicy, {"table": START, "learning_rate": 0.6 / beta}),
        "reference": (FrozenPolicy, {"table": START}),
        "reward": (TableReward, {"table": [REWARDS.tolist()]}),
        "cost": (TableReward, {"table": [COSTS.tolist()]}),
        "critic": (TableCritic, {}),
        "cost_critic": (TableCritic, {}),
    }
    keys = {"kl_coefficient": beta, **algorithm}
    return TableRun(recipe=SAFE_RLHF, algorithm=keys, workers=workers, iterations=iterations).train()


def multipliers(trained: Trained) -> list[float]:
    return [metrics["constraint/lambda"] for metrics in trained.metrics]


@pytest.mark.parametrize(("beta", "multiplier", "reward"), [(0.5, 1.1516, 0.4856), (0.1, 0.6072, 0.4877)])
def test_the_closed_form_is_that_of_the_reference(beta: float, multiplier: float, reward: float) -> None:
    found = find_multiplier(beta)
    policy = find_policy(found, beta)
    assert found == pytest.approx(multiplier, abs=1e-4)
    assert policy @ COSTS == pytest.approx(0.0, abs=1e-9)
    assert policy @ REWARDS == pytest.approx(reward, abs=1e-4)


@pytest.mark.parametrize("space", ["log", "projected"])
@pytest.mark.parametrize(("beta", "rate"), [(0.5, 0.3), (0.1, 0.2)])
def test_multiplier_and_policy_reach_the_closed_form(beta: float, rate: float, space: str) -> None:
    iterations = 36
    trained = train(beta=beta, iterations=iterations, lambda_space=space, lambda_learning_rate=rate)
    wanted = find_multiplier(beta)
    assert np.mean(multipliers(trained)[-iterations // 4 :]) == pytest.approx(wanted, abs=5e-3)
    np.testing.assert_allclose(trained.policy[0], find_policy(wanted, beta), atol=2e-3)
    assert trained.policy[0] @ COSTS == pytest.approx(0.0, abs=2e-3)
    assert trained.metrics[-1]["constraint/infeasible"] == 0.0
    # The first step distinguishes the two spaces.
    excess = trained.metrics[0]["constraint/cost"]
    first = np.exp(rate * excess) if space == "log" else 1.0 + rate * excess
    assert multipliers(trained)[0] == pytest.approx(first, rel=1e-12)


def test_a_constraint_that_the_kl_penalty_forbids_is_reported() -> None:
    beta, limit = 0.5, -0.8
    nearest = REFERENCE * np.exp(-COSTS / beta)
    nearest /= nearest.sum()
    assert COSTS.min() < limit < nearest @ COSTS  # an arm is cheap enough, and no policy near the reference
    trained = train(beta=beta, iterations=30, lambda_learning_rate=1.0, cost_limit=limit)
    assert trained.metrics[-1]["constraint/infeasible"] == 1.0
    assert multipliers(trained)[-1] > 100
    np.testing.assert_allclose(trained.policies[-1][0], nearest, atol=5e-3)


def test_a_constraint_without_effect_lets_the_multiplier_fall() -> None:
    beta = 0.5
    trained = train(beta=beta, iterations=20, lambda_space="projected", lambda_learning_rate=0.5, cost_limit=2.0)
    assert multipliers(trained)[-1] == 0.0
    np.testing.assert_allclose(trained.policy[0], find_policy(0.0, beta), atol=2e-3)


def test_the_multiplier_waits_for_the_critics() -> None:
    trained = train(beta=0.5, iterations=4, lambda_learning_rate=1.0, critic_warmup=2)
    found = multipliers(trained)
    assert found[:2] == [1.0, 1.0]
    assert found[2] == pytest.approx(np.exp(trained.metrics[2]["constraint/cost"]), rel=1e-12)
    assert trained.metrics[0]["constraint/cost"] > 0
