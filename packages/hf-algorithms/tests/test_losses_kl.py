"""KL terms: their values in numpy, their expected gradients and their fixed points by exact enumeration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_algorithms.losses import Aggregation, KLTerm, PolicyLoss, Reinforce
from hf_protocols import ConfigError

FORMS = [("k1", "value"), ("k2", "value"), ("k3", "value"), ("k1", "unbiased"), ("k3", "unbiased")]
REFERENCE = np.array([0.4, 0.3, 0.2, 0.1])
REWARDS = np.array([1.0, 0.7, 0.2, 0.0])
BETA = 0.5


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize(("estimator", "gradient"), FORMS)
def test_kl_terms_follow_their_formulas(estimator: Any, gradient: Any, mode: Any) -> None:
    generator = np.random.default_rng(3)
    mask = generator.random((5, 6)) < 0.6
    mask[1], mask[2, 0] = False, True
    logprobs, reference = (np.where(mask, generator.normal(-2, 0.6, (5, 6)), np.nan) for _ in range(2))
    reference[2] = logprobs[2]
    columns = {"old_logprobs": logprobs, "ref_logprobs": reference, "advantages": np.zeros((5, 6))}
    batch = {name: torch.tensor(column) for name, column in columns.items()} | {"response_mask": torch.tensor(mask)}
    own = torch.tensor(logprobs).requires_grad_()
    term = KLTerm(coefficient=0.3, estimator=estimator, gradient=gradient)
    loss, metrics = PolicyLoss(kl=term, aggregation=Aggregation(mode=mode))({"logprobs": own}, batch)
    loss.backward()
    assert own.grad is not None
    value, slope = 0.0, np.zeros((5, 6))
    for i, t in np.argwhere(mask):
        d = logprobs[i, t] - reference[i, t]
        kl = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator]
        weight = 0.3 / (mask[i].sum() if mode == "seq-mean-token-mean" else 1)
        value += weight * kl
        slope[i, t] = weight * {"k1": 1.0, "k2": d, "k3": 1 - np.exp(-d)}[estimator]
        if gradient == "unbiased":
            slope[i, t] += weight * kl
    assert float(loss.detach()) == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(own.grad.numpy(), slope, rtol=1e-12, atol=1e-15)
    assert metrics["policy_loss"][0] == 0.0
    assert not [name for name in metrics if name.startswith("kl")]  # known before the update


def test_kl_is_measured_if_old_logprobs_are_the_current_ones() -> None:
    generator = np.random.default_rng(1)
    mask = generator.random((5, 6)) < 0.7
    mask[1], mask[2, 0] = False, True
    logprobs, reference = (np.where(mask, generator.normal(-2, 0.6, (5, 6)), np.nan) for _ in range(2))
    columns = {"ref_logprobs": reference, "advantages": np.zeros((5, 6)), "response_mask": mask}
    loss = PolicyLoss(kl=KLTerm(coefficient=0.3), old="current")
    _, metrics = loss(
        {"logprobs": torch.tensor(logprobs)}, {name: torch.tensor(each) for name, each in columns.items()}
    )
    d = (logprobs - reference)[mask]
    for name, wanted in (("k1", d), ("k2", d**2 / 2), ("k3", np.exp(-d) - 1 + d)):
        np.testing.assert_allclose(metrics[f"kl/{name}"], (wanted.sum(), mask.sum()), rtol=1e-12, atol=1e-12)
        if name != "k2":
            np.testing.assert_allclose(metrics[f"kl_sequence/{name}"], (wanted.sum(), 5), rtol=1e-12, atol=1e-12)


def test_kl_is_also_measured_on_responses_that_are_not_trained() -> None:
    """A sum over the responses that a filter leaves, divided by all of them, would be neither's mean."""
    logprobs, reference = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]]), torch.tensor([[-1.5, -1.0], [-1.0, -1.0]])
    batch = {
        "response_mask": torch.tensor([[True, True], [True, False]]),
        "finish_reason": torch.tensor([0, 1]),
        "advantages": torch.zeros(2, 2),
        "ref_logprobs": reference,
    }
    loss = PolicyLoss(kl=KLTerm(coefficient=0.1), old="current", aggregation=Aggregation(overlong_filter=True))
    _, metrics = loss({"logprobs": logprobs.requires_grad_()}, batch)
    difference = np.array([0.5, -1.0, -2.0])
    k3 = np.exp(-difference) - 1 + difference
    wanted = {"kl/k1": difference.mean(), "kl/k3": k3.mean(), "kl_sequence/k1": difference.sum() / 2}
    for name, mean in {**wanted, "kl_sequence/k3": k3.sum() / 2}.items():
        value, count = metrics[name]
        assert value / count == pytest.approx(mean)


def expected_gradient(loss: PolicyLoss, policy: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Of a softmax policy's logits: the mean over its own answers, each a row of one token."""
    logits = torch.tensor(np.log(policy)).requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for action, share in enumerate(policy):
        logprobs = logits.log_softmax(0)[action][None, None]
        batch = {
            "ref_logprobs": torch.tensor([[np.log(REFERENCE[action])]]),
            "advantages": torch.tensor([[rewards[action]]]),
            "response_mask": torch.ones(1, 1, dtype=torch.bool),
        }
        total = total + share * loss({"logprobs": logprobs}, batch)[0]
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient.numpy()


def penalise(estimator: Any, gradient: Any) -> PolicyLoss:
    return PolicyLoss(
        surrogate=Reinforce(), old="current", kl=KLTerm(coefficient=BETA, estimator=estimator, gradient=gradient)
    )


def gradient_of_divergence(policy: np.ndarray, *, forward: bool) -> np.ndarray:
    logits = torch.tensor(np.log(policy)).requires_grad_()
    log_policy, log_reference = logits.log_softmax(0), torch.tensor(np.log(REFERENCE))
    if forward:
        divergence = (log_reference.exp() * (log_reference - log_policy)).sum()
    else:
        divergence = (log_policy.exp() * (log_policy - log_reference)).sum()
    (gradient,) = torch.autograd.grad(divergence, logits)
    return gradient.numpy()


@pytest.mark.parametrize("policy", [np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.7, 0.1, 0.1, 0.1]), REFERENCE])
@pytest.mark.parametrize(("estimator", "gradient"), FORMS)
def test_expected_gradients_are_those_of_one_direction(estimator: str, gradient: str, policy: np.ndarray) -> None:
    found = expected_gradient(penalise(estimator, gradient), policy, np.zeros(4))
    if (estimator, gradient) == ("k1", "value"):
        wanted = np.zeros(4)
    else:
        wanted = BETA * gradient_of_divergence(policy, forward=(estimator, gradient) == ("k3", "value"))
    np.testing.assert_allclose(found, wanted, atol=1e-14)


def fixed_point_of_k3_in_the_loss() -> np.ndarray:
    """pi_a = beta ref_a / (beta + v - r_a), v such that they add up to 1."""
    low, high = REWARDS.max() - BETA + 1e-12, REWARDS.max() + 10
    for _ in range(200):
        middle = (low + high) / 2
        total = (BETA * REFERENCE / (BETA + middle - REWARDS)).sum()
        low, high = (middle, high) if total > 1 else (low, middle)
    return BETA * REFERENCE / (BETA + low - REWARDS)


def test_fixed_points_distinguish_the_forms() -> None:
    reverse = REFERENCE * np.exp(REWARDS / BETA)
    reverse /= reverse.sum()
    other = fixed_point_of_k3_in_the_loss()
    np.testing.assert_allclose(reverse, [0.6467, 0.2662, 0.0653, 0.0219], atol=6e-5)
    np.testing.assert_allclose(other, [0.6297, 0.2429, 0.0895, 0.0379], atol=6e-5)
    for estimator, gradient in FORMS:
        at_reverse, at_other = (
            np.abs(expected_gradient(penalise(estimator, gradient), point, REWARDS)).max() for point in (reverse, other)
        )
        if (estimator, gradient) == ("k1", "value"):
            assert at_reverse > 0.05 and at_other > 0.05  # it goes on to the best answer
        elif (estimator, gradient) == ("k3", "value"):
            assert at_other < 1e-12 and at_reverse > 0.005
        else:
            assert at_reverse < 1e-12 and at_other > 0.005


@pytest.mark.parametrize(("estimator", "gradient"), FORMS)
@pytest.mark.parametrize("difference", [-1e4, -30.0, 30.0, 1e4])
def test_gradients_of_kl_terms_are_finite(estimator: Any, gradient: Any, difference: float) -> None:
    logprobs = torch.tensor([[difference]], requires_grad=True)
    term = KLTerm(coefficient=1.0, estimator=estimator, gradient=gradient)
    found = term(logprobs, torch.zeros(1, 1)).sum()
    found.backward()
    assert logprobs.grad is not None
    assert bool(torch.isfinite(found)) and bool(torch.isfinite(logprobs.grad).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coefficient": -0.1}, r"kl_coefficient=-0\.1"),
        ({"coefficient": 0.1, "estimator": "k4"}, "kl_estimator='k4'"),
        ({"coefficient": 0.1, "gradient": "score"}, "kl_gradient='score'"),
        (
            {"coefficient": 0.1, "estimator": "k2", "gradient": "unbiased"},
            "kl_gradient='unbiased': k2 has the gradient",
        ),
    ],
)
def test_kl_terms_refuse_what_has_no_meaning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KLTerm(**options)
