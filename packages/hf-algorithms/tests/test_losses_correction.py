"""Corrections of the sampler against loops, and their bias by exact enumeration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hf_algorithms.losses import Aggregation, Clip, Correction, KLTerm, PolicyLoss, Reinforce
from hf_protocols import ConfigError

KINDS = [
    ("tis", "geometric", 0.0, 1.2),
    ("tis", "geometric", 0.9, 1.1),
    ("icepop", "geometric", 0.8, 1.3),
    ("sequence_mask", "geometric", 0.95, 1.1),
    ("sequence_mask", "product", 0.5, 1.6),
]


def make_batch(seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = np.random.default_rng(seed)
    mask = generator.random((7, 6)) < 0.7
    mask[5] = False
    logprobs = generator.normal(-2, 0.5, (7, 6))
    columns = {
        "old_logprobs": logprobs + generator.normal(0, 0.2, (7, 6)),
        "rollout_logprobs": logprobs + generator.normal(0, 0.3, (7, 6)),
        "ref_logprobs": logprobs + generator.normal(0, 0.3, (7, 6)),
        "advantages": generator.normal(0, 1, (7, 6)),
    }
    dirty = {name: torch.tensor(np.where(mask, column, np.nan)) for name, column in columns.items()}
    return torch.tensor(np.where(mask, logprobs, np.nan)), {**dirty, "response_mask": torch.tensor(mask)}


def reference_weights(
    kind: str, statistic: str, low: float, high: float, old: np.ndarray, mu: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    weights = np.zeros(mask.shape)
    for i, row in enumerate(mask):
        ratios = [math.exp(old[i, t] - mu[i, t]) for t in np.flatnonzero(row)]
        if kind == "tis":
            kept = [min(max(w, low), high) for w in ratios]
        elif kind == "icepop":
            kept = [w if low <= w <= high else 0.0 for w in ratios]
        else:
            whole = math.prod(ratios) ** (1 / max(len(ratios), 1) if statistic == "geometric" else 1)
            inside = low <= whole <= high
            kept = [(w if statistic == "geometric" else whole) if inside else 0.0 for w in ratios]
        weights[i, row] = kept
    return weights


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "statistic", "low", "high"), KINDS)
@pytest.mark.parametrize("old", ["column", "current"])
def test_corrections_weigh_the_surrogate(
    old: Any, kind: Any, statistic: Any, low: float, high: float, seed: int
) -> None:
    logprobs, batch = make_batch(seed)
    mask = batch["response_mask"].numpy()
    loss = PolicyLoss(correction=Correction(kind=kind, low=low, high=high, statistic=statistic), old=old)
    own = logprobs.clone().requires_grad_()
    found, metrics = loss({"logprobs": own}, batch)
    found.backward()
    assert own.grad is not None
    past = (batch["old_logprobs"] if old == "column" else logprobs).numpy()
    mu, a = batch["rollout_logprobs"].numpy(), batch["advantages"].numpy()
    weights = reference_weights(kind, statistic, low, high, past, mu, mask)
    ratio = np.exp(logprobs.numpy() - past)
    is_clipped = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))
    losses = np.where(mask, -a * np.where(is_clipped, np.clip(ratio, 0.8, 1.2), ratio) * weights, 0.0)
    np.testing.assert_allclose(float(found.detach()), losses.sum(), rtol=1e-12)
    # The weights have no gradient, also where they are of the current policy.
    wanted = np.where(mask & ~is_clipped, -a * ratio * weights, 0.0)
    np.testing.assert_allclose(own.grad.numpy(), wanted, rtol=1e-12, atol=1e-15)
    assert loss.count(batch) == mask.sum()
    log_weight = (past - mu)[mask]
    np.testing.assert_allclose(
        metrics["rollout/mismatch_k3"], ((np.exp(log_weight) - 1 - log_weight).sum(), mask.sum()), rtol=1e-12
    )
    np.testing.assert_allclose(metrics["rollout/weight_mean"], (np.exp(log_weight).sum(), mask.sum()), rtol=1e-12)
    np.testing.assert_allclose(metrics["rollout/weight_max"], (np.exp(log_weight).max(), 1.0), rtol=1e-12)
    assert metrics["rollout/masked"] == ((weights[mask] == 0).sum(), mask.sum())


def test_old_logprobs_of_the_sampler_weigh_one() -> None:
    """The ratio holds the whole difference then, and it must not count twice."""
    logprobs, batch = make_batch(4)
    bypass = {**batch, "old_logprobs": batch["rollout_logprobs"]}
    corrected, metrics = PolicyLoss(correction=Correction(kind="icepop", low=0.9, high=1.1))(
        {"logprobs": logprobs}, bypass
    )
    plain, _ = PolicyLoss()({"logprobs": logprobs}, bypass)
    assert float(corrected) == pytest.approx(float(plain), rel=1e-12)
    assert metrics["rollout/mismatch_k3"][0] == metrics["rollout/masked"][0] == 0.0
    assert metrics["rollout/weight_max"] == (1.0, 1.0)


def test_the_denominator_counts_tokens_that_a_correction_drops() -> None:
    logprobs, batch = make_batch(5)
    for mode in ("token-mean", "seq-mean-token-mean"):
        aggregation = Aggregation(mode=mode)  # type: ignore[arg-type]
        dropping = PolicyLoss(correction=Correction(kind="icepop", low=0.99, high=1.01), aggregation=aggregation)
        _, metrics = dropping({"logprobs": logprobs}, batch)
        assert metrics["rollout/masked"][0] > 10
        assert dropping.count(batch) == PolicyLoss(aggregation=aggregation).count(batch)


def test_a_correction_leaves_the_kl_term_alone() -> None:
    logprobs, batch = make_batch(6)
    kl, correction = KLTerm(coefficient=0.7), Correction(kind="tis", high=1.1)
    joined, _ = PolicyLoss(kl=kl, correction=correction)({"logprobs": logprobs}, batch)
    corrected, _ = PolicyLoss(correction=correction)({"logprobs": logprobs}, batch)
    with_kl, _ = PolicyLoss(kl=kl)({"logprobs": logprobs}, batch)
    plain, _ = PolicyLoss()({"logprobs": logprobs}, batch)
    assert float(joined - corrected) == pytest.approx(float(with_kl - plain), rel=1e-12)


def test_current_policy_is_compared_with_the_sampler_if_possible() -> None:
    logprobs, batch = make_batch(7)
    _, metrics = PolicyLoss(old="current")({"logprobs": logprobs}, batch)
    assert metrics["rollout/masked"] == (0.0, float(batch["response_mask"].sum()))
    assert metrics["rollout/mismatch_k3"][0] > 0
    del batch["rollout_logprobs"]
    _, metrics = PolicyLoss(old="current")({"logprobs": logprobs}, batch)
    assert not [name for name in metrics if name.startswith("rollout/")]


POLICY_LOGITS = torch.tensor([0.4, -0.3, 0.9, 0.0], dtype=torch.float64)
SAMPLER = np.array([0.05, 0.35, 0.2, 0.4])
REWARDS = np.array([1.0, 0.7, 0.2, 0.0])


def expected_gradient(loss: PolicyLoss) -> np.ndarray:
    """Of the policy's logits on a bandit: the mean over the sampler's four answers, each a row of one token."""
    logits = POLICY_LOGITS.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for action, share in enumerate(SAMPLER):
        logprobs = logits.log_softmax(0)[action][None, None]
        batch = {
            "old_logprobs": logprobs.detach(),
            "rollout_logprobs": torch.tensor([[math.log(share)]], dtype=torch.float64),
            "advantages": torch.tensor([[REWARDS[action]]], dtype=torch.float64),
            "response_mask": torch.ones(1, 1, dtype=torch.bool),
        }
        total = total + share * loss({"logprobs": logprobs}, batch)[0]
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient.numpy()


@pytest.mark.parametrize("surrogate", [Reinforce(), Clip()])
def test_bias_of_truncated_weights_is_the_enumerated_one(surrogate: Any) -> None:
    """Bias = sum_a mu_a (w_a - bounded w_a) A_a grad log pi_a, and none where nothing is bounded."""
    policy = POLICY_LOGITS.softmax(0).numpy()
    scores = np.eye(4) - policy  # row a: the gradient of log pi_a
    exact = -(policy * REWARDS) @ scores
    weights = policy / SAMPLER
    assert weights.max() > 4
    whole = PolicyLoss(surrogate=surrogate, correction=Correction(kind="tis", high=100.0))
    np.testing.assert_allclose(expected_gradient(whole), exact, rtol=1e-12, atol=1e-15)
    kinds: list[tuple[Correction, np.ndarray]] = [
        (Correction(kind="tis", high=2.0), np.minimum(weights, 2.0)),
        (Correction(kind="icepop", low=0.4, high=2.0), np.where((weights >= 0.4) & (weights <= 2), weights, 0.0)),
        (Correction(kind="sequence_mask", high=2.0, statistic="product"), np.where(weights <= 2, weights, 0.0)),
    ]
    for correction, bounded in kinds:
        found = expected_gradient(PolicyLoss(surrogate=surrogate, correction=correction))
        bias = (SAMPLER * (weights - bounded) * REWARDS) @ scores
        np.testing.assert_allclose(found - exact, bias, rtol=1e-10, atol=1e-14)
        assert np.abs(bias).max() > 0.01
    uncorrected = expected_gradient(PolicyLoss(surrogate=surrogate))
    np.testing.assert_allclose(uncorrected, -(SAMPLER * REWARDS) @ scores, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", ["tis", "icepop", "sequence_mask"])
@pytest.mark.parametrize("difference", [1e4, -1e4])
def test_weights_stay_finite(kind: Any, difference: float) -> None:
    old, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    weights = Correction(kind=kind, low=0.0, high=1e30).weigh(old, old - difference, mask)
    np.testing.assert_allclose(weights, math.exp(math.copysign(20, difference)), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mask"}, r"correction='mask' is not one of 'tis', 'icepop', 'sequence_mask'"),
        ({"kind": "tis", "statistic": "sum"}, "statistic='sum'"),
        ({"kind": "tis", "high": 0.0}, r"correction_high=0\.0"),
        ({"kind": "icepop", "low": -1.0}, r"correction_low=-1\.0"),
        ({"kind": "icepop", "low": 2.0, "high": 2.0}, r"correction_low=2\.0: is not below correction_high=2\.0"),
    ],
)
def test_corrections_refuse_what_has_no_meaning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Correction(**options)
