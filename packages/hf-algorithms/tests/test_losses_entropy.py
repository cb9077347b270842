"""The entropy of a policy: as a metric, and as a term of the loss whose gradient is exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hf_algorithms.losses import Aggregation, KLTerm, PolicyLoss, Reinforce
from hf_protocols import BatchError, ConfigError

B, T, V = 4, 3, 5
MASK = torch.tensor([[True, True, True], [True, False, True], [False, False, False], [False, True, False]])
AGGREGATIONS = (
    Aggregation(mode="token-mean"),
    Aggregation(mode="seq-mean-token-mean"),
    Aggregation(mode="seq-mean-token-sum"),
    Aggregation(mode="constant", constant=7.0),
    Aggregation(mode="prompt-mean"),
)


def columns(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("old_logprobs", "ref_logprobs", "advantages")
    found = {name: torch.randn(B, T, generator=generator, dtype=torch.float64) for name in names}
    return found | {"response_mask": MASK, "group_tokens": torch.tensor([5.0, 5.0, 1.0, 1.0])}


def logits(seed: int = 1) -> torch.Tensor:
    return torch.randn(B, T, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def score(given: torch.Tensor) -> dict[str, torch.Tensor]:
    """A model's outputs: the sampled tokens are 0, 1, 2, ... in turn."""
    distribution = torch.distributions.Categorical(logits=given)
    return {"logprobs": distribution.log_prob(torch.arange(B * T).view(B, T) % V), "entropy": distribution.entropy()}


def compute_entropies(given: torch.Tensor) -> np.ndarray:
    weights = np.exp(given.numpy() - given.numpy().max(-1, keepdims=True))
    shares = weights / weights.sum(-1, keepdims=True)
    return -(shares * np.log(shares)).sum(-1)


def weigh(aggregation: Aggregation) -> np.ndarray:
    """Weight of every token over the denominator, token by token."""
    mask, rows = MASK.numpy(), [0, 1, 3]
    weights = np.zeros((B, T))
    for row in rows:
        length, group = mask[row].sum(), columns()["group_tokens"][row].item()
        weights[row] = {
            "token-mean": 1 / mask.sum(),
            "seq-mean-token-mean": 1 / (length * len(rows)),
            "seq-mean-token-sum": 1 / len(rows),
            "constant": 1 / (7.0 * B),
            "prompt-mean": 1 / (2 * group),
        }[aggregation.mode] * mask[row]
    return weights


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda each: each.mode)
def test_the_bonus_is_the_mean_entropy_of_the_aggregation(aggregation: Aggregation) -> None:
    loss = PolicyLoss(aggregation=aggregation)
    outputs, batch = score(logits()), columns()
    plain, metrics = loss(outputs, batch)
    reduced, _ = replace(loss, entropy_coefficient=0.25)(outputs, batch)
    entropies = compute_entropies(logits())
    difference = float(plain - reduced) / aggregation.count(batch)
    np.testing.assert_allclose(difference, 0.25 * (weigh(aggregation) * entropies).sum(), rtol=1e-12)
    total, count = metrics["entropy"]
    np.testing.assert_allclose(total / count, entropies[MASK.numpy()].mean(), rtol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda each: each.mode)
def test_the_gradient_is_that_of_finite_differences(aggregation: Aggregation) -> None:
    loss = PolicyLoss(
        surrogate=Reinforce(),
        aggregation=aggregation,
        entropy_coefficient=0.3,
        kl=KLTerm(coefficient=0.1, estimator="k1"),
    )
    # Of the bonus alone: the policy gradient is not that of its own value.
    bonus = replace(loss, surrogate=Reinforce(), kl=None)
    batch = columns() | {"advantages": torch.zeros(B, T, dtype=torch.float64)}
    given = logits().requires_grad_()
    assert torch.autograd.gradcheck(lambda each: bonus(score(each), batch)[0], given)
    (whole,) = torch.autograd.grad(loss(score(given), columns())[0], given)
    (part,) = torch.autograd.grad(bonus(score(given), batch)[0], given)
    (rest,) = torch.autograd.grad(replace(loss, entropy_coefficient=0.0)(score(given), columns())[0], given)
    torch.testing.assert_close(whole, part + rest)


def test_tokens_without_a_mask_change_nothing() -> None:
    loss = PolicyLoss(entropy_coefficient=0.5)
    found = []
    for filler in (0.0, torch.nan, torch.inf):
        given = {
            name: each.clone().masked_fill(~MASK, filler).requires_grad_() for name, each in score(logits()).items()
        }
        value, metrics = loss(given, columns())
        value.backward()
        found.append((float(value.detach()), metrics, [each.grad for each in given.values()]))
    for value, metrics, gradients in found[1:]:
        assert (value, metrics) == found[0][:2]
        for gradient, wanted in zip(gradients, found[0][2], strict=True):
            assert torch.equal(gradient, wanted)
            assert not gradient[~MASK].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda each: each.mode)
def test_micro_batches_add_up_to_the_batch(aggregation: Aggregation) -> None:
    loss, outputs, batch = PolicyLoss(aggregation=aggregation, entropy_coefficient=0.5), score(logits()), columns()
    whole, metrics = loss(outputs, batch)
    for parts in ([[0], [1], [2], [3]], [[3, 0], [2, 1]], [[2], [1, 0, 3]]):
        sums = [
            loss({k: v[rows] for k, v in outputs.items()}, {k: v[rows] for k, v in batch.items()}) for rows in parts
        ]
        torch.testing.assert_close(sum(each for each, _ in sums), whole)
        for index in (0, 1):
            total = sum(each["entropy"][index] for _, each in sums)
            np.testing.assert_allclose(total, metrics["entropy"][index])


def test_the_expected_gradient_is_that_of_reward_and_entropy() -> None:
    """All tokens of a bandit are enumerated: the expectation is exact, without a sample."""
    coefficient, rewards = 0.7, torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64)
    table = torch.tensor([0.3, -0.2, 0.5, 0.0], dtype=torch.float64).requires_grad_()
    loss = PolicyLoss(surrogate=Reinforce(), old="current", entropy_coefficient=coefficient)
    probabilities = torch.softmax(table.detach(), 0)
    expected = torch.zeros(4, dtype=torch.float64)
    for token, probability in enumerate(probabilities):
        distribution = torch.distributions.Categorical(logits=table)
        outputs = {
            "logprobs": distribution.log_prob(torch.tensor(token)).view(1, 1),
            "entropy": distribution.entropy().view(1, 1),
        }
        batch = {"response_mask": torch.ones(1, 1, dtype=torch.bool), "advantages": rewards[token].view(1, 1)}
        (gradient,) = torch.autograd.grad(loss(outputs, batch)[0], table)
        expected += probability * gradient
    distribution = torch.softmax(table, 0)
    objective = (distribution * rewards).sum() - coefficient * (distribution * distribution.log()).sum()
    (wanted,) = torch.autograd.grad(objective, table)
    torch.testing.assert_close(expected, -wanted, atol=1e-14, rtol=1e-12)


def test_a_model_without_entropies_serves_a_loss_without_a_bonus() -> None:
    outputs = {"logprobs": score(logits())["logprobs"]}
    _, metrics = PolicyLoss()(outputs, columns())
    assert "entropy" not in metrics
    for given in (outputs, TensorDict(outputs, batch_size=[B])):
        with pytest.raises(BatchError, match=r"entropy_coefficient=0.5: the model's outputs have no entropy"):
            PolicyLoss(entropy_coefficient=0.5)(given, columns())


@pytest.mark.parametrize("value", [-0.1, float("nan"), "much", None])
def test_a_coefficient_that_is_not_a_weight_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="entropy_coefficient"):
        PolicyLoss(entropy_coefficient=value)
