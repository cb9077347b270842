"""Preference losses against whole pairs, and their optima by exact enumeration."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from hf_algorithms.losses import PreferenceLoss, label_pairs
from hf_protocols import BatchError, ConfigError, merge_metrics


def make_batch(seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Five pairs in mixed order: one tied, one unscorable; holes and padding hold NaN."""
    generator = np.random.default_rng(seed)
    mask = generator.random((10, 5)) < 0.7
    mask[:, 0] = True
    logprobs, reference = (np.where(mask, generator.normal(-2, 0.5, (10, 5)), np.nan) for _ in range(2))
    batch = {
        "old_logprobs": torch.tensor(logprobs),
        "ref_logprobs": torch.tensor(reference),
        "response_mask": torch.tensor(mask),
        "group_id": torch.tensor([7, 3, 3, 9, 7, 1, 4, 1, 9, 4]),
        "scores": torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0, 3.0, math.nan, 3.0, 1.5, 1.0]),
    }
    return torch.tensor(logprobs), {**batch, **label_pairs(batch)}


PAIRS = ((0, 4), (2, 1), (8, 3))
"""(chosen, rejected) rows."""


def whole_pairs(kind: str, beta: float, logprobs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over pairs, with both rows in one graph."""
    losses = []
    for chosen, rejected in PAIRS:
        sums = [
            (logprobs[i][batch["response_mask"][i]] - batch["ref_logprobs"][i][batch["response_mask"][i]]).sum()
            for i in (chosen, rejected)
        ]
        h = sums[0] - sums[1]
        losses.append(-torch.log(torch.sigmoid(beta * h)) if kind == "dpo" else (h - 1 / (2 * beta)) ** 2)
    return sum(losses, torch.zeros(())) / len(losses)


@pytest.mark.parametrize("parts", [[range(10)], [[4, 1, 9], [0, 3], [2, 5, 6, 7], [8]]])
@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_rows_apart_have_the_gradient_of_their_pair(kind: Any, parts: list[Any]) -> None:
    logprobs, batch = make_batch(1)
    own, whole = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    loss = PreferenceLoss(beta=0.4, kind=kind)
    total, count, answers = torch.zeros(()), 0.0, []
    for rows in parts:
        micro_batch = {name: column[list(rows)] for name, column in batch.items()}
        found, metrics = loss({"logprobs": own[list(rows)]}, micro_batch)
        total, count = total + found, count + loss.count(micro_batch)
        answers.append(metrics)
    (total / count).backward()
    wanted = whole_pairs(kind, 0.4, whole, batch)
    wanted.backward()
    assert own.grad is not None and whole.grad is not None
    assert count == 3.0
    assert float(total.detach()) / count == pytest.approx(float(wanted.detach()), rel=1e-12)
    np.testing.assert_allclose(own.grad.numpy(), whole.grad.numpy(), rtol=1e-10, atol=1e-14)
    merged = merge_metrics(answers)
    assert merged["preference/loss"] == (pytest.approx(3 * float(wanted.detach())), 3.0)
    assert merged["preference/skipped"] == (4.0, 10.0)
    assert merged["preference/stale_max"] == (0.0, 1.0)
    assert merged["preference/accuracy"][0] in (0.0, 2.0, 4.0, 6.0)


def test_a_stale_partner_shows() -> None:
    logprobs, batch = make_batch(2)
    moved = logprobs.clone()
    moved[0, 0] += 0.25
    _, metrics = PreferenceLoss()({"logprobs": moved}, batch)
    assert metrics["preference/stale_max"] == (pytest.approx(0.25), 1.0)


def test_labels_go_by_group_and_skip_ties() -> None:
    _, batch = make_batch(3)
    assert batch["preference"].tolist() == [1, -1, 1, -1, -1, 0, 0, 0, 1, 0]
    mask = batch["response_mask"].numpy()
    ratios = np.where(mask, (batch["old_logprobs"] - batch["ref_logprobs"]).numpy(), 0.0).sum(1)
    np.testing.assert_allclose(batch["partner_logratio"], ratios[[4, 2, 1, 8, 0, 7, 9, 5, 3, 6]], rtol=1e-12)


def test_groups_of_another_size_are_refused() -> None:
    _, batch = make_batch(3)
    batch["group_id"][0] = 3
    with pytest.raises(BatchError, match=r"group_id=3: has 3 rows.*rollout\.samples_per_prompt=2"):
        label_pairs(batch)


def test_skipped_rows_change_nothing() -> None:
    logprobs, batch = make_batch(4)
    own = logprobs.clone().requires_grad_()
    batch["partner_logratio"][batch["preference"] == 0] = math.nan
    loss, _ = PreferenceLoss()({"logprobs": own}, batch)
    loss.backward()
    assert own.grad is not None
    assert bool(torch.isfinite(loss)) and not own.grad[batch["preference"] == 0].any()
    rows = [5, 7]
    nothing = {name: column[rows] for name, column in batch.items()}
    loss, metrics = PreferenceLoss()({"logprobs": logprobs[rows].requires_grad_()}, nothing)
    assert float(loss.detach()) == PreferenceLoss().count(nothing) == metrics["preference/loss"][1] == 0.0


REFERENCE = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.7, 0.2, 0.0], dtype=torch.float64)


def expected_gradient(loss: PreferenceLoss, policy: torch.Tensor, arms: range) -> torch.Tensor:
    """Of the policy's logits: all ordered pairs of arms, labelled by the Bradley-Terry model of the rewards."""
    logits = policy.log().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for chosen, rejected in permutations(arms, 2):
        logprobs = logits.log_softmax(0)[[chosen, rejected]][:, None]
        columns = {
            "old_logprobs": logprobs.detach(),
            "ref_logprobs": REFERENCE.log()[[chosen, rejected]][:, None],
            "response_mask": torch.ones(2, 1, dtype=torch.bool),
            "scores": torch.tensor([1.0, 0.0]),
            "group_id": torch.tensor([0, 0]),
        }
        share = torch.sigmoid(REWARDS[chosen] - REWARDS[rejected])
        total = total + share * loss({"logprobs": logprobs}, {**columns, **label_pairs(columns)})[0]
    return torch.autograd.grad(total, logits)[0]


def test_the_optimum_of_dpo_is_the_tilted_reference() -> None:
    """Reference times exp(reward / beta), which no other beta or sign has."""
    tilted = REFERENCE * torch.exp(REWARDS / 0.5)
    loss = PreferenceLoss(beta=0.5)
    assert float(expected_gradient(loss, tilted / tilted.sum(), range(4)).abs().max()) < 1e-14
    assert float(expected_gradient(loss, REFERENCE, range(4)).abs().max()) > 0.1
    assert float(expected_gradient(PreferenceLoss(beta=0.4), tilted / tilted.sum(), range(4)).abs().max()) > 0.01


def test_the_optimum_of_ipo_on_two_arms_is_closed_form() -> None:
    """h = (2 p - 1) / (2 beta), with p the probability that the first arm is preferred."""
    beta = 0.5
    h = (2 * torch.sigmoid(REWARDS[0] - REWARDS[1]) - 1) / (2 * beta)
    tilted = REFERENCE * torch.exp(torch.stack([h, h * 0, h * 0, h * 0]))
    loss = PreferenceLoss(beta=beta, kind="ipo")
    assert float(expected_gradient(loss, tilted / tilted.sum(), range(2)).abs().max()) < 1e-14
    assert float(expected_gradient(loss, REFERENCE, range(2)).abs().max()) > 0.1


def test_preference_losses_refuse_what_has_no_meaning() -> None:
    with pytest.raises(ConfigError, match="kind='hinge'"):
        PreferenceLoss(kind="hinge")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"beta=0\.0"):
        PreferenceLoss(beta=0.0)
