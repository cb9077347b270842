"""`kl/*` of an iteration: the divergence of the policy that drew the responses, wherever it is measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hf_algorithms.recipes import RECIPES
from tabular_roles import FrozenPolicy, TableCritic, TablePolicy, TableReward, TableRun

POLICY = np.array([0.1, 0.2, 0.3, 0.4])
REFERENCE = np.array([0.4, 0.3, 0.2, 0.1])
DIFFERENCE = np.log(POLICY / REFERENCE)
WANTED = {
    "k1": POLICY @ DIFFERENCE,
    "k2": POLICY @ DIFFERENCE**2 / 2,
    "k3": POLICY @ (np.exp(-DIFFERENCE) - 1 + DIFFERENCE),
}


def train(name: str, **algorithm: Any) -> dict[str, float]:
    """The metrics of one iteration, whose updates move the policy far."""
    workers: dict[str, Any] = {
        "actor": (TablePolicy, {"table": [np.log(POLICY).tolist()], "learning_rate": 2.0}),
        "reference": (FrozenPolicy, {"table": [np.log(REFERENCE).tolist()]}),
        "reward": (TableReward, {"table": [[1.0, 0.0, 0.0, 0.5]]}),
        **({"critic": (TableCritic, {})} if name == "ppo" else {}),
    }
    run = TableRun(recipe=RECIPES[name], algorithm=algorithm, workers=workers, iterations=1, samples=400)
    trained = run.train()
    assert np.abs(trained.policies[0][0] - POLICY).max() > 0.05
    return trained.metrics[0]


@pytest.mark.parametrize("name", ["ppo", "grpo"])
@pytest.mark.parametrize(
    ("kl_place", "old_logprobs", "epochs"),
    [
        ("reward", "recomputed", 3),
        ("reward", "sampled", 3),
        ("loss", "recomputed", 3),
        ("loss", "sampled", 3),
        ("loss", "current", 1),
    ],
)
def test_divergence_is_that_of_the_policy_before_the_update(
    name: str, kl_place: str, old_logprobs: str, epochs: int
) -> None:
    keys = {"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_place": kl_place}
    found = train(name, **keys, old_logprobs=old_logprobs, epochs=epochs)
    for estimator, wanted in WANTED.items():
        assert found[f"kl/{estimator}"] == pytest.approx(wanted, rel=1e-6)
        if estimator != "k2":  # responses of one token
            assert found[f"kl_sequence/{estimator}"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("old_logprobs", ["recomputed", "sampled", "current"])
def test_without_a_penalty_nothing_is_measured(old_logprobs: str) -> None:
    found = train("ppo", kl_coefficient=0.1, kl_place="none", old_logprobs=old_logprobs)
    assert not [name for name in found if name.startswith("kl")]


def test_online_dpo_measures_the_divergence_before_each_update() -> None:
    workers: dict[str, Any] = {
        "actor": (TablePolicy, {"table": [np.log(POLICY).tolist()], "learning_rate": 0.1}),
        "reference": (FrozenPolicy, {"table": [np.log(REFERENCE).tolist()]}),
        "reward": (TableReward, {"table": [[1.0, 0.0, 0.0, 0.5]]}),
    }
    run = TableRun(
        recipe=RECIPES["online_dpo"], algorithm={}, workers=workers, iterations=1, prompts=(0,) * 400, samples=2
    )
    found = run.train().metrics[0]
    # Pairs are drawn: 800 samples, not all of the table.
    assert found["kl/k1"] == pytest.approx(WANTED["k1"], abs=0.1)
