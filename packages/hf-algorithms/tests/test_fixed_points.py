"""Shipped recipes train softmax tables to the policies that theory says they end at, each in closed form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hf_algorithms.config import parse_config
from hf_algorithms.recipes import RECIPES, Recipe
from hf_engine import SamplingParams
from hf_protocols import ConfigError
from tabular_roles import BradleyTerryLabels, FrozenPolicy, TableCritic, TablePolicy, TableReward, TableRun, Trained

REFERENCE = np.array([0.4, 0.3, 0.2, 0.1])
REWARDS = np.array([1.0, 0.7, 0.2, 0.0])
BETA = 0.5
START = [np.log(REFERENCE).tolist()]
TOLERANCE = 1.5e-3
"""Of a probability: a batch of 256 samples is rounded, and the rounding averages out over iterations."""


def tilt(rewards: np.ndarray, beta: float, reference: np.ndarray = REFERENCE) -> np.ndarray:
    """The policy that maximises E[r] - beta KL(policy || reference): reference exp(r / beta), normalised."""
    weights = reference * np.exp(np.asarray(rewards) / beta)
    return weights / weights.sum(-1, keepdims=True)


def solve_forward_kl(rewards: np.ndarray, beta: float) -> np.ndarray:
    """The policy that maximises E[r] - beta KL(reference || policy): beta reference / (beta + v - r)."""
    low, high = rewards.max() - beta + 1e-9, rewards.max()
    for _ in range(200):
        middle = (low + high) / 2
        total = (beta * REFERENCE / (beta + middle - rewards)).sum()
        low, high = (middle, high) if total > 1 else (low, middle)
    return beta * REFERENCE / (beta + low - rewards)


def train_bandit(name: str | Recipe, *, iterations: int = 18, rate: float = 1.2, **algorithm: Any) -> Trained:
    workers: dict[str, Any] = {
        "actor": (TablePolicy, {"table": START, "learning_rate": rate}),
        "reference": (FrozenPolicy, {"table": START}),
        "reward": (TableReward, {"table": [REWARDS.tolist()]}),
    }
    if name == "ppo":
        workers["critic"] = (TableCritic, {})
    keys = {"kl_coefficient": BETA, **algorithm}
    recipe = RECIPES[name] if isinstance(name, str) else name
    return TableRun(recipe=recipe, algorithm=keys, workers=workers, iterations=iterations).train()


def test_the_two_divergences_have_fixed_points_of_their_own() -> None:
    reverse, forward = tilt(REWARDS, BETA), solve_forward_kl(REWARDS, BETA)
    np.testing.assert_allclose(reverse, [0.6467, 0.2662, 0.0653, 0.0219], atol=1e-4)
    np.testing.assert_allclose(forward, [0.6297, 0.2429, 0.0895, 0.0379], atol=1e-4)
    assert forward.sum() == pytest.approx(1.0)
    assert np.abs(reverse - forward).max() > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("ppo", {"whiten": False}),
        ("rloo", {}),
        ("remax", {}),
        ("reinforce_pp", {"whiten": False}),
        ("dr_grpo", {"kl_place": "reward", "kl_estimator": "k1"}),
    ],
)
def test_kl_in_the_reward_tilts_the_reference(name: str, keys: dict[str, Any]) -> None:
    np.testing.assert_allclose(train_bandit(name, **keys).policy[0], tilt(REWARDS, BETA), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("estimator", "gradient"), [("k1", "unbiased"), ("k2", "value"), ("k3", "unbiased")], ids=lambda word: word
)
def test_kl_in_the_loss_tilts_the_reference(estimator: str, gradient: str) -> None:
    keys = {"kl_place": "loss", "kl_estimator": estimator, "kl_gradient": gradient}
    np.testing.assert_allclose(train_bandit("rloo", **keys).policy[0], tilt(REWARDS, BETA), atol=TOLERANCE)


def test_k3_without_a_weight_ends_elsewhere() -> None:
    trained = train_bandit("rloo", kl_place="loss", kl_estimator="k3", kl_gradient="value")
    np.testing.assert_allclose(trained.policy[0], solve_forward_kl(REWARDS, BETA), atol=TOLERANCE)


@pytest.mark.parametrize(
    "keys",
    [
        {"kl_place": "loss", "kl_estimator": "k1", "kl_gradient": "value"},
        {"kl_place": "reward", "kl_estimator": "k2"},
        {"kl_place": "reward", "kl_estimator": "k3"},
    ],
)
def test_estimators_in_the_wrong_place_do_not_hold_the_policy(keys: dict[str, str]) -> None:
    """So the configuration refuses them; a step that uses them ends at the best arm, far from the tilted reference."""
    with pytest.raises(ConfigError, match=r"algorithm\.kl_(gradient|estimator) = "):
        parse_config({"data": {"train": "rows.jsonl"}, "algorithm": {"name": "rloo", "kl_coefficient": BETA, **keys}})
    usual = RECIPES["rloo"]

    def step(roles: Any, prompts: Any, config: Any, context: Any) -> Any:
        return usual.step(roles, prompts, config.model_copy(update=keys), context)

    trained = train_bandit(replace(usual, step=step), iterations=16)
    assert trained.policies[-1][0, 0] > 0.99


def train_two_scales(name: str) -> np.ndarray:
    """Two prompts whose rewards differ by a factor of ten, with KL in the loss."""
    tables = START * 2
    workers: dict[str, Any] = {
        "actor": (TablePolicy, {"table": tables, "learning_rate": 0.4}),
        "reference": (FrozenPolicy, {"table": tables}),
        "reward": (TableReward, {"table": [REWARDS.tolist(), (10 * REWARDS).tolist()]}),
    }
    keys = {"kl_coefficient": 2.0, "kl_place": "loss"}
    run = TableRun(recipe=RECIPES[name], algorithm=keys, workers=workers, iterations=20, prompts=(0, 1))
    return run.train().policy


def test_centred_advantages_keep_the_scale_of_rewards() -> None:
    wanted = tilt(np.stack([REWARDS, 10 * REWARDS]), 2.0)
    np.testing.assert_allclose(train_two_scales("dr_grpo"), wanted, atol=TOLERANCE)
    assert wanted[1, 0] - wanted[0, 0] > 0.3


def test_division_by_the_deviation_equalises_the_scales() -> None:
    wanted = REFERENCE
    for _ in range(300):  # the policy is tilted by rewards in units of its own deviation
        deviation = np.sqrt(wanted @ (REWARDS - wanted @ REWARDS) ** 2)
        wanted = (wanted + tilt(REWARDS / deviation, 2.0)) / 2
    found = train_two_scales("grpo")
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    np.testing.assert_allclose(found[0], wanted, atol=2 * TOLERANCE)


def test_a_student_reaches_its_teachers_table() -> None:
    teacher = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    workers: dict[str, Any] = {
        "actor": (TablePolicy, {"table": [[0.0] * 4] * 2, "learning_rate": 0.7}),
        "teacher": (FrozenPolicy, {"table": np.log(teacher).tolist()}),
        "reward": (TableReward, {"table": [[0.0] * 4] * 2}),
    }
    run = TableRun(
        recipe=RECIPES["distillation"],
        algorithm={},
        workers=workers,
        iterations=10,
        samples=32,
        prompts=(0, 1),
        sampling=SamplingParams(max_new_tokens=2),
    )
    student = run.train().policies[-1]
    divergence = (student * np.log(student / teacher)).sum(1)
    assert divergence.max() < 1e-3


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_student_reaches_its_teachers_top_k(top_k: int) -> None:
    """The student keeps its initial ratios between the tokens outside the teacher's top k."""
    teacher = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.11, 0.09]])
    start = np.array([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    workers: dict[str, Any] = {
        "actor": (TablePolicy, {"table": np.log(start).tolist(), "learning_rate": 0.7}),
        "teacher": (FrozenPolicy, {"table": np.log(teacher).tolist()}),
        "reward": (TableReward, {"table": [[0.0] * 4] * 2}),
    }
    run = TableRun(
        recipe=RECIPES["distillation"],
        algorithm={"signal": "top_k", "top_k": top_k},
        workers=workers,
        iterations=12,
        samples=4,  # the loss reads distributions: which tokens are drawn does not matter
        prompts=(0, 1),
        sampling=SamplingParams(max_new_tokens=2),
    )
    trained = run.train()
    student, likeliest = trained.policies[-1], np.argsort(-teacher, axis=1)[:, :top_k]
    for row in range(2):
        rest = np.setdiff1d(np.arange(4), likeliest[row])
        np.testing.assert_allclose(student[row, likeliest[row]], teacher[row, likeliest[row]], atol=2e-3)
        wanted = start[row, rest] / start[row, rest].sum()
        np.testing.assert_allclose(student[row, rest] / student[row, rest].sum(), wanted, atol=0.02)
    if top_k == 3:  # all tokens but one: the whole table
        assert (student * np.log(student / teacher)).sum(1).max() < 1e-3
    assert trained.metrics[-1]["distillation/kl"] < 1e-3 < trained.metrics[0]["distillation/kl"]


def test_an_entropy_bonus_ends_at_the_softmax_of_the_rewards() -> None:
    """E[r] + c H is largest at exp(r / c), normalised: the tilt of a uniform reference."""
    coefficient = 0.5
    trained = train_bandit("rloo", kl_coefficient=0.0, kl_place="none", entropy_coefficient=coefficient)
    wanted = tilt(REWARDS, coefficient, np.full(4, 0.25))
    np.testing.assert_allclose(trained.policy[0], wanted, atol=TOLERANCE)
    before = -(REFERENCE * np.log(REFERENCE)).sum()
    assert trained.metrics[0]["actor/entropy"] == pytest.approx(before)
    last = trained.policies[-2][0]  # the metric is of the policy before the update
    assert trained.metrics[-1]["actor/entropy"] == pytest.approx(-(last * np.log(last)).sum())


def test_online_dpo_tilts_by_what_the_labels_say() -> None:
    beta, reference, rewards = 0.8, np.array([0.3, 0.7]), np.array([1.0, 0.0])
    start = [np.log(reference).tolist()]
    workers: dict[str, Any] = {
        "actor": (TablePolicy, {"table": start, "learning_rate": 1.8}),
        "reference": (FrozenPolicy, {"table": start}),
        "reward": (BradleyTerryLabels, {"table": [rewards.tolist()]}),
    }
    run = TableRun(
        recipe=RECIPES["online_dpo"],
        algorithm={"beta": beta},
        workers=workers,
        iterations=40,
        samples=2,
        prompts=(0,) * 128,
    )
    np.testing.assert_allclose(run.train().policy[0], tilt(rewards, beta, reference), atol=4e-3)


SAMPLER = np.array([0.4, 0.3, 0.2, 0.1])
POLICY = SAMPLER**1.3 / (SAMPLER**1.3).sum()
"""The table whose logits, divided by 1.3, give `SAMPLER`: 200 samples hit its probabilities exactly."""


def find_gradient(**algorithm: Any) -> np.ndarray:
    """The direction in which one iteration moves the logits, from samples of `SAMPLER`."""
    workers: dict[str, Any] = {
        "actor": (TablePolicy, {"table": [np.log(POLICY).tolist()], "sampler_temperature": 1.3}),
        "reward": (TableReward, {"table": [REWARDS.tolist()]}),
    }
    keys = {"clip_low": 1e6, "clip_high": 1e6, **algorithm}
    run = TableRun(recipe=RECIPES["dr_grpo"], algorithm=keys, workers=workers, iterations=1, samples=200)
    return -run.train().gradient[0]


def weigh(weights: np.ndarray) -> np.ndarray:
    """The gradient of sum_a SAMPLER_a w_a A_a log POLICY_a with respect to the logits."""
    parts = SAMPLER * weights * (REWARDS - SAMPLER @ REWARDS)
    return parts - POLICY * parts.sum()


TRUE = POLICY * (REWARDS - POLICY @ REWARDS)


def test_a_whole_weight_gives_the_true_gradient() -> None:
    np.testing.assert_allclose(find_gradient(correction="tis", correction_high=1e3), TRUE, atol=1e-12)
    assert np.abs(find_gradient() - TRUE).max() > 0.01


def test_a_capped_weight_has_the_bias_of_what_is_cut() -> None:
    weights, cap = POLICY / SAMPLER, 1.01
    bias = weigh(np.maximum(weights - cap, 0.0))
    assert np.abs(bias).max() > 1e-3
    found = find_gradient(correction="tis", correction_high=cap)
    np.testing.assert_allclose(TRUE - found, bias, atol=1e-12)


def test_icepop_leaves_out_what_is_outside_its_bounds() -> None:
    weights = POLICY / SAMPLER
    kept = np.where((weights >= 0.9) & (weights <= 1.05), weights, 0.0)
    assert 0 < (kept > 0).sum() < 4
    found = find_gradient(correction="icepop", correction_low=0.9, correction_high=1.05)
    np.testing.assert_allclose(found, weigh(kept), atol=1e-12)


def test_sampled_old_log_probs_count_the_difference_once() -> None:
    twice = weigh((POLICY / SAMPLER) ** 2)
    found = find_gradient(old_logprobs="sampled")
    np.testing.assert_allclose(found, TRUE, atol=1e-12)
    assert np.abs(found - twice).max() > 0.005


CUT, GOES_ON, DISCOUNT = 3, 0.75, 0.9


@pytest.mark.parametrize(("bootstrap", "gae_lambda"), [("zero", 1.0), ("value", 1.0), ("value", 0.95)])
def test_values_of_a_cut_chain_are_unbiased_by_bootstrap(bootstrap: str, gae_lambda: float) -> None:
    """At every token a response ends with probability 1/4, which pays 1; after three tokens it is cut."""
    decay = DISCOUNT * GOES_ON
    without_cut = np.full(CUT, (1 - GOES_ON) / (1 - decay))
    with_cut = np.array([(1 - GOES_ON) * (1 - decay**left) / (1 - decay) for left in range(CUT, 0, -1)])
    workers: dict[str, Any] = {
        "actor": (TablePolicy, {"table": [np.log([1 - GOES_ON, GOES_ON]).tolist()], "ends": True}),
        "critic": (TableCritic, {"num_positions": CUT, "learning_rate": 1.0}),
        "reward": (TableReward, {"table": [[1.0, 0.0]]}),
    }
    keys = {
        "kl_coefficient": 0.0,
        "gamma": DISCOUNT,
        "gae_lambda": gae_lambda,
        "bootstrap": bootstrap,
        "value_clip": None,
        "critic_warmup": 1000,  # the policy stays
    }
    run = TableRun(
        recipe=RECIPES["ppo"],
        algorithm=keys,
        workers=workers,
        iterations=18 if bootstrap == "value" else 4,
        samples=4**CUT,  # hits every probability exactly
        sampling=SamplingParams(max_new_tokens=CUT),
    )
    trained = run.train()
    assert trained.values is not None
    np.testing.assert_allclose(trained.values[0], without_cut if bootstrap == "value" else with_cut, atol=2e-3)
    np.testing.assert_allclose(trained.policies[-1][0], [1 - GOES_ON, GOES_ON], atol=1e-12)
