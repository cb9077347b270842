"""The multiplier of a constraint: its steps, and the constrained bandit's fixed point by exact gradients."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from hf_algorithms.advantages import LagrangianAdvantage, Multiplier
from hf_protocols.errors import BatchError, ConfigError

NAN = float("nan")
REFERENCE = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.7, 0.2, 0.0], dtype=torch.float64)
COSTS = torch.tensor([1.0, 0.4, -0.5, -1.0], dtype=torch.float64)


def best_policy(multiplier: float, beta: float) -> torch.Tensor:
    """ref * exp((r - lambda c) / ((1 + lambda) beta)), normalised: the optimum of the bandit for one lambda."""
    return (REFERENCE.log() + (REWARDS - multiplier * COSTS) / ((1 + multiplier) * beta)).softmax(0)


def solve_multiplier(beta: float, limit: float) -> float:
    """The lambda at which that policy's cost is the limit, by bisection: the cost falls in lambda."""
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float(best_policy(middle, beta) @ COSTS) > limit else (low, middle)
    return low


def advance_policy(logits: torch.Tensor, multiplier: float, beta: float, rate: float) -> torch.Tensor:
    """One step of exact gradient ascent on softmax logits, with all arms in one batch of one-token responses."""
    logprobs = logits.log_softmax(0)
    zeros = torch.zeros(4, 1, dtype=torch.float64)
    columns = {
        "scores": REWARDS,
        "costs": COSTS,
        "old_logprobs": logprobs[:, None],
        "ref_logprobs": REFERENCE.log()[:, None],
        "values": zeros,
        "cost_values": zeros,
        "response_mask": torch.ones(4, 1, dtype=torch.bool),
    }
    estimator = LagrangianAdvantage(multiplier=multiplier, kl_coefficient=beta)
    advantages = estimator(columns)["advantages"][:, 0]
    policy = logprobs.exp()
    # E[A grad log pi] with respect to the logits
    return logits + rate * policy * (advantages - policy @ advantages)


def ascend_bandit(multiplier: Multiplier, beta: float, rounds: int, rate: float) -> tuple[torch.Tensor, dict[str, Any]]:
    """Alternates policy and multiplier, with exact expected costs."""
    logits, state = REFERENCE.log(), multiplier.start()
    for _ in range(rounds):
        logits = advance_policy(logits, state["value"], beta, rate)
        state = multiplier.update(state, [float(logits.softmax(0) @ COSTS)])
    return logits.softmax(0), state


@pytest.mark.parametrize("space", ["log", "projected"])
@pytest.mark.parametrize(
    ("beta", "wanted", "policy", "reward"),
    [
        (0.5, 1.1516, (0.2438, 0.2630, 0.2886, 0.2046), 0.4856),
        (0.1, 0.6072, (0.2460, 0.2753, 0.2451, 0.2335), 0.4877),
    ],
)
def test_bandit_reaches_its_fixed_point(
    space: Any, beta: float, wanted: float, policy: tuple[float, ...], reward: float
) -> None:
    multiplier = Multiplier(space=space, window=1, learning_rate=0.1)
    found, state = ascend_bandit(multiplier, beta, rounds=600, rate=4.0)
    assert state["value"] == pytest.approx(wanted, abs=5.1e-5)
    assert state["value"] == pytest.approx(solve_multiplier(beta, 0.0), abs=1e-6)
    np.testing.assert_allclose(found, policy, atol=5.1e-5)
    np.testing.assert_allclose(found, best_policy(state["value"], beta), atol=1e-6)
    assert float(found @ COSTS) == pytest.approx(0.0, abs=1e-6)
    assert float(found @ REWARDS) == pytest.approx(reward, abs=5.1e-5)
    assert not multiplier.is_infeasible(state)


def test_a_loose_constraint_leaves_the_policy_alone() -> None:
    beta, cost = 0.5, 0.6986
    multiplier = Multiplier(space="projected", window=1, limit=0.8)
    found, state = ascend_bandit(multiplier, beta, rounds=300, rate=4.0)
    assert state["value"] == 0.0
    np.testing.assert_allclose(found, best_policy(0.0, beta), atol=1e-6)
    assert float(found @ COSTS) == pytest.approx(cost, abs=5.1e-5)
    assert not multiplier.is_infeasible(state)


@pytest.mark.parametrize("space", ["log", "projected"])
@pytest.mark.parametrize("maximum", [None, 5.0])
def test_a_limit_below_what_the_kl_allows_is_infeasible(space: Any, maximum: float | None) -> None:
    """The least cost of an arm is -1, but the KL keeps the policy at ref * exp(-c / beta) or above."""
    beta = 0.5
    least = float((REFERENCE.log() - COSTS / beta).softmax(0) @ COSTS)
    rate = 0.1 if space == "log" else 3.0  # lambda explodes in log space, and grows by a line otherwise
    multiplier = Multiplier(space=space, window=1, limit=least - 0.1, maximum=maximum, learning_rate=rate)
    found, state = ascend_bandit(multiplier, beta, rounds=200, rate=4.0)
    assert -1 < multiplier.limit < least < float(found @ COSTS)
    assert multiplier.is_infeasible(state)
    assert math.isfinite(state["value"])
    reachable = Multiplier(space=space, window=1, limit=least + 0.1)
    assert not reachable.is_infeasible(ascend_bandit(reachable, beta, rounds=200, rate=4.0)[1])


@pytest.mark.parametrize("space", ["log", "projected"])
def test_update_is_the_published_step_over_a_window(space: Any) -> None:
    """Against a second book-keeping: a deque of the window, and log lambda as the variable."""
    rng = np.random.default_rng(0)
    multiplier = Multiplier(space=space, init=0.5, learning_rate=0.3, limit=0.2, window=12, maximum=1.5)
    state, seen, value = multiplier.start(), deque[float](maxlen=12), 0.5
    for _ in range(60):
        costs = rng.normal(0.3, 1.0, size=5).tolist()
        seen.extend(costs)
        excess = sum(seen) / len(seen) - 0.2
        if space == "log":
            value = math.exp(min(math.log(value) + 0.3 * value * excess, math.log(1.5)))
        else:
            value = min(max(0.0, value + 0.3 * excess), 1.5)
        state = multiplier.update(state, costs)
        assert state["value"] == pytest.approx(value, rel=1e-12, abs=1e-15)
        assert state["cost"] == pytest.approx(excess + 0.2)


def test_a_batch_beyond_the_window_counts_whole() -> None:
    state = Multiplier(window=2).update(Multiplier().start(), [5.0, 0.0, 1.0, 2.0])
    assert state["cost"] == 2.0
    assert Multiplier(window=2).update(state, [4.0])["cost"] == 3.0


def test_a_state_survives_json_and_is_not_changed() -> None:
    multiplier, rng = Multiplier(window=3), np.random.default_rng(1)
    batches = [rng.normal(size=2).tolist() for _ in range(20)]
    through = plain = multiplier.start()
    for batch in batches:
        before = json.dumps(through)
        through = json.loads(json.dumps(multiplier.update(through, batch)))
        plain = multiplier.update(plain, torch.tensor(batch, dtype=torch.float64))
        assert through == plain
        assert json.dumps(json.loads(before)) == before
    assert len(plain["costs"]) == 3


def test_unknown_costs_are_left_out() -> None:
    multiplier = Multiplier(window=4)
    state = multiplier.update(multiplier.start(), [1.0, NAN, 0.5])
    assert state == multiplier.update(multiplier.start(), [1.0, 0.5])
    assert multiplier.update(state, [NAN, NAN]) == multiplier.update(state, []) == state
    with pytest.raises(BatchError, match="costs: inf is infinite"):
        multiplier.update(state, [0.0, float("inf")])


@pytest.mark.parametrize("cost", [1e300, -1e300])
@pytest.mark.parametrize("space", ["log", "projected"])
def test_a_huge_cost_leaves_a_usable_multiplier(space: Any, cost: float) -> None:
    multiplier = Multiplier(space=space, window=1)
    state = multiplier.start()
    for each in (cost, -cost, cost):
        state = multiplier.update(state, [each])
        assert 0 <= state["value"] <= 1e6
        assert space == "projected" or state["value"] > 0


def test_infeasible_needs_eight_windows_at_the_bound() -> None:
    multiplier = Multiplier(window=8, maximum=1.0)
    states = list(itertools.accumulate([[1.0, 1.0]] * 32, multiplier.update, initial=multiplier.start()))
    assert [multiplier.is_infeasible(state) for state in states] == [False] * 32 + [True]
    below = multiplier.update(states[-1], [-9.0, -9.0])
    assert not multiplier.is_infeasible(below)
    assert not multiplier.is_infeasible(multiplier.update(below, [9.0] * 7))


@pytest.mark.parametrize(("fall", "rate", "infeasible"), [(0.0, 1e-2, True), (0.2, 1e-2, False), (0.0, 1e-4, False)])
def test_a_cost_that_does_not_answer_is_reported(fall: float, rate: float, infeasible: bool) -> None:
    """Noisy costs above the limit, far from any bound, until lambda has doubled; a small lambda says nothing."""
    rng = np.random.default_rng(3)
    multiplier = Multiplier(space="projected", learning_rate=rate, window=100, init=0.0)
    state, reported = multiplier.start(), []
    for update in range(200):
        state = multiplier.update(state, rng.normal(4.0 - fall * update / 10, 0.3, size=10).tolist())
        reported.append(multiplier.is_infeasible(state))
    assert not any(reported[:79])
    assert state["value"] < 10.0
    assert any(reported) is infeasible


def follow(multiplier: Multiplier, updates: int, seed: int, **task: float) -> list[bool]:
    """Reports of a task in which the policy follows lambda with a delay, on noisy costs in batches of 32.

    The cost that the policy tends to is linear in lambda's weight w, as near the optimum of the KL-regularised problem:
    `free` at w = 0 and `full` at w = 1. Each update moves the policy by `speed` of the way.
    """
    rng, state, reported = np.random.default_rng(seed), multiplier.start(), []
    cost = task["free"]
    for _ in range(updates):
        weight = state["value"] / (1 + state["value"])
        cost += task["speed"] * (task["free"] * (1 - weight) + task["full"] * weight - cost)
        state = multiplier.update(state, rng.normal(cost, task["noise"], size=32).tolist())
        reported.append(multiplier.is_infeasible(state))
    return reported


@pytest.mark.parametrize("space", ["log", "projected"])
@pytest.mark.parametrize("speed", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_a_feasible_task_is_never_reported(space: Any, speed: float, noise: float) -> None:
    """Lambda overshoots and swings, the more the slower the policy is; the fixed point is lambda = 2."""
    for seed in range(12):
        multiplier = Multiplier(space=space, window=128, learning_rate=0.1)
        assert not any(follow(multiplier, 300, seed, free=0.6, full=-0.3, speed=speed, noise=noise))


@pytest.mark.parametrize("space", ["log", "projected"])
@pytest.mark.parametrize("speed", [0.01, 0.03])
def test_a_slow_policy_that_comes_to_the_limit_is_not_reported(space: Any, speed: float) -> None:
    """Lambda grows far beyond what is needed, or stands at its bound, for hundreds of updates."""
    for seed, maximum in itertools.product(range(4), (None, 5.0)):
        multiplier = Multiplier(space=space, window=128, learning_rate=0.1, maximum=maximum)
        assert not any(follow(multiplier, 500, seed, free=0.6, full=-0.6, speed=speed, noise=0.3))


@pytest.mark.parametrize(("space", "rate"), [("log", 0.1), ("projected", 1.0)])
@pytest.mark.parametrize("maximum", [None, 5.0])
def test_an_infeasible_task_is_reported_for_good(space: Any, rate: float, maximum: float | None) -> None:
    """Its cost at full weight is 0.5 above the limit, with noise as large."""
    for seed in range(6):
        multiplier = Multiplier(space=space, window=128, learning_rate=rate, maximum=maximum)
        reported = follow(multiplier, 500, seed, free=1.0, full=0.5, speed=0.1, noise=0.5)
        assert all(reported[400:])
        assert not any(reported[:32])


def test_a_long_stretch_is_kept_short() -> None:
    multiplier = Multiplier(window=2, maximum=1.0)
    state = multiplier.start()
    for update in range(1000):
        state = multiplier.update(state, [1.0, 2.0])
        assert len(state["above"]) <= 64
        assert sum(each[0] for each in state["above"]) == 2 * (update + 1)
        assert sum(each[1] for each in state["above"]) == 3 * (update + 1)
        assert sum(each[2] for each in state["above"]) == 5 * (update + 1)
    assert multiplier.is_infeasible(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": "exp"}, "lambda_space='exp' is not one of 'log', 'projected'"),
        ({"init": 0.0}, "lambda_init=0.0 must be a finite number above 0"),
        ({"init": 2.0, "maximum": 1.0}, "lambda_init=2.0 is above lambda_max=1.0. Lower the first"),
        ({"learning_rate": NAN}, "lambda_learning_rate=nan must be"),
        ({"limit": float("inf")}, "cost_limit=inf is not a finite number"),
        ({"limit": "0"}, "cost_limit='0' is not a finite number"),
        ({"limit": -(10**400)}, "cost_limit=.* is not a finite number"),
        ({"window": 0}, "cost_window=0 must be a whole number of at least 1"),
        ({"maximum": 0}, "lambda_max=0 must be a finite number above 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Multiplier(**options)
