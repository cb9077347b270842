"""Losses against numpy, token by token."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from hf_algorithms.kl import estimate_kl
from hf_algorithms.losses import (
    DPPOTV,
    Aggregation,
    Clip,
    Correction,
    KLTerm,
    PolicyLoss,
    PreferenceLoss,
    SupervisedLoss,
    ValueLoss,
)

MASK = torch.tensor([[True, True, True], [True, False, False]])


def random_columns(*names: str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # padding holds garbage on purpose: no loss may look at it
    return {name: torch.randn(2, 3, generator=generator) for name in names}


def chosen(columns: dict[str, torch.Tensor], name: str) -> np.ndarray:
    return columns[name][MASK].numpy().astype(float)


def test_policy_loss_follows_the_clipped_objective() -> None:
    outputs = random_columns("logprobs", seed=1)
    batch = {**random_columns("old_logprobs", "advantages", seed=2), "response_mask": MASK}
    loss, metrics = PolicyLoss()(outputs, batch)
    ratio = np.exp(chosen(outputs, "logprobs") - chosen(batch, "old_logprobs"))
    advantages = chosen(batch, "advantages")
    objective = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    np.testing.assert_allclose(float(loss), -objective.sum(), rtol=1e-5)
    assert metrics["policy_loss"][1] == 4
    assert metrics["clip_low"] == (float(((ratio < 0.8) & (advantages < 0)).sum()), 4.0)
    assert metrics["clip_high"] == (float(((ratio > 1.2) & (advantages > 0)).sum()), 4.0)
    np.testing.assert_allclose(metrics["update_kl"][0], (ratio - 1 - np.log(ratio)).sum(), rtol=1e-5)


def test_policy_gradient_is_zero_where_the_ratio_is_clipped_away() -> None:
    logprobs = torch.tensor([[1.0, 0.0, 5.0]], requires_grad=True)
    batch = {
        "old_logprobs": torch.zeros(1, 3),
        "advantages": torch.tensor([[1.0, 1.0, -1.0]]),
        "response_mask": torch.tensor([[True, True, False]]),
    }
    loss, _ = PolicyLoss()({"logprobs": logprobs}, batch)
    loss.backward()
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad, [[0.0, -1.0, 0.0]])


def test_a_ratio_above_the_cap_weighs_as_much_as_the_cap() -> None:
    log_ratios = np.array([-1.0, 0.05, 0.6, 0.9, 80.0])
    logprobs = torch.tensor(log_ratios[None], dtype=torch.float32, requires_grad=True)
    batch = {
        "old_logprobs": torch.zeros(1, 5),
        "advantages": torch.full((1, 5), -3.0),
        "response_mask": torch.ones(1, 5, dtype=torch.bool),
    }
    loss, metrics = PolicyLoss(surrogate=Clip(ratio_cap=2.0))({"logprobs": logprobs}, batch)
    loss.backward()
    assert logprobs.grad is not None
    truncated = np.minimum(np.exp(log_ratios), 2.0)
    np.testing.assert_allclose(float(loss.detach()), 3.0 * np.maximum(truncated, 0.8).sum(), rtol=1e-5)
    # The worse of the two counts: where the ratio is below 0.8 that is the clipped one, which has no gradient.
    np.testing.assert_allclose(logprobs.grad[0], 3.0 * np.where(log_ratios < np.log(0.8), 0.0, truncated), rtol=1e-5)
    assert metrics["truncated_fraction"] == (2.0, 5.0)
    assert metrics["sampler_gap"] == (pytest.approx(np.abs(log_ratios).sum()), 5.0)
    assert metrics["sampler_gap_max"] == (80.0, 1.0)
    assert metrics["sampler_gap_share"] == (4.0, 5.0)


def test_value_loss_takes_the_worse_of_clipped_and_unclipped() -> None:
    outputs = random_columns("values", seed=3)
    batch = {**random_columns("values", "returns", seed=4), "response_mask": MASK}
    loss, metrics = ValueLoss(clip=0.2)(outputs, batch)
    values, old, returns = chosen(outputs, "values"), chosen(batch, "values"), chosen(batch, "returns")
    clipped = np.clip(values, old - 0.2, old + 0.2)
    expected = 0.5 * np.maximum((values - returns) ** 2, (clipped - returns) ** 2).sum()
    np.testing.assert_allclose(float(loss), expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["squared_error"][0], ((values - returns) ** 2).sum(), rtol=1e-5)


def test_supervised_loss_is_the_cross_entropy_of_the_response() -> None:
    outputs = random_columns("logprobs", seed=5)
    loss, metrics = SupervisedLoss()(outputs, {"response_mask": MASK})
    np.testing.assert_allclose(float(loss), -chosen(outputs, "logprobs").sum(), rtol=1e-5)
    assert metrics["supervised/loss"][1] == 4


HOLES = torch.tensor([[True, False, True, False], [False, False, False, False], [False, True, True, True]])


@pytest.mark.parametrize(
    "loss", [PolicyLoss(), PolicyLoss(surrogate=Clip(ratio_cap=1.1)), ValueLoss(clip=0.2), SupervisedLoss()]
)
def test_a_loss_with_holes_is_that_of_the_tokens_left(loss: Callable[..., Any]) -> None:
    names = ("logprobs", "values", "old_logprobs", "advantages", "returns")
    generator = torch.Generator().manual_seed(7)
    columns = {name: torch.randn(3, 4, generator=generator, dtype=torch.float64) for name in names}
    old_values = torch.randn(3, 4, generator=generator, dtype=torch.float64)

    def run(mask: torch.Tensor, pick: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any, list[torch.Tensor]]:
        outputs = {name: pick(columns[name]).requires_grad_() for name in ("logprobs", "values")}
        batch = {name: pick(columns[name]) for name in ("old_logprobs", "advantages", "returns")}
        found, metrics = loss(outputs, {**batch, "values": pick(old_values), "response_mask": mask})
        found.backward()
        return found.detach(), metrics, [each.grad for each in outputs.values() if each.grad is not None]

    # A token that is left out may hold anything, also in what a gradient flows through.
    whole, metrics, (gradient,) = run(HOLES, lambda column: column.masked_fill(~HOLES, torch.nan))
    wanted, compact_metrics, (compact,) = run(torch.ones(1, 5).bool(), lambda column: column[HOLES][None])
    np.testing.assert_allclose(whole, wanted, rtol=1e-6)
    np.testing.assert_allclose(gradient[HOLES], compact[0], rtol=1e-6)
    assert not gradient[~HOLES].any()
    assert metrics.keys() == compact_metrics.keys()
    for name, pair in metrics.items():
        np.testing.assert_allclose(pair, compact_metrics[name], rtol=1e-6)


def test_kl_estimates_agree_with_the_exact_divergence() -> None:
    policy, other = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    estimates = estimate_kl(torch.tensor(np.log(policy)), torch.tensor(np.log(other)))
    exact = float((policy * np.log(policy / other)).sum())
    for name in ("k1", "k3"):
        np.testing.assert_allclose(float((torch.tensor(policy) * estimates[name]).sum()), exact, rtol=1e-12)
    np.testing.assert_allclose(estimates["k2"], np.log(policy / other) ** 2 / 2)


@given(st.lists(st.tuples(st.floats(-1e4, 0), st.floats(-1e4, 0)), min_size=1))
def test_k3_is_never_negative_and_always_finite(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = torch.tensor(pairs).unbind(1)
    k3 = estimate_kl(ours, theirs)["k3"]
    assert bool((k3 >= 0).all())
    assert bool(k3.isfinite().all())


@pytest.mark.parametrize("log_ratio", [0.1, -0.1, 200.0, -200.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_policy_gradients_are_finite_for_any_ratio(log_ratio: float, advantage: float) -> None:
    logprobs = torch.tensor([[log_ratio]], requires_grad=True)
    batch = {
        "old_logprobs": torch.zeros(1, 1),
        "advantages": torch.full((1, 1), advantage),
        "response_mask": torch.ones(1, 1, dtype=torch.long),
    }
    loss, _ = PolicyLoss()({"logprobs": logprobs}, batch)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()
    if abs(log_ratio) < 1:
        inside = not (advantage > 0 and np.exp(log_ratio) > 1.2) and not (advantage < 0 and np.exp(log_ratio) < 0.8)
        wanted = -advantage * np.exp(log_ratio) if inside else 0.0
        np.testing.assert_allclose(float(logprobs.grad), wanted, rtol=1e-5)


def test_kl_estimates_follow_their_formulas_and_stay_ordered() -> None:
    difference = np.concatenate([-np.geomspace(1e-3, 1e9, 60)[::-1], [0.0], np.geomspace(1e-3, 1e9, 60)])
    found = estimate_kl(torch.tensor(difference), torch.zeros(len(difference), dtype=torch.float64))
    k3 = found["k3"].numpy()
    small = difference > -20
    np.testing.assert_allclose(k3[small], np.expm1(-difference[small]) + difference[small], rtol=1e-6, atol=1e-12)
    assert (k3 >= 0).all() and np.isfinite(k3).all()
    assert (np.diff(k3[difference >= 0]) >= 0).all() and (np.diff(k3[difference <= 0]) <= 0).all()
    impossible = torch.tensor([-torch.inf])
    assert all(float(estimate) == 0 for estimate in estimate_kl(impossible, impossible).values())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_losses_take_masks_of_numbers(dtype: torch.dtype) -> None:
    outputs = random_columns("logprobs", "values", seed=1)
    columns = random_columns("old_logprobs", "advantages", "values", "returns", seed=2)
    for loss in (PolicyLoss(), ValueLoss(clip=0.2), SupervisedLoss()):
        wanted, _ = loss(outputs, {**columns, "response_mask": MASK})
        found, _ = loss(outputs, {**columns, "response_mask": MASK.to(dtype)})
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "loss",
    [
        PolicyLoss(
            surrogate=DPPOTV(),
            aggregation=Aggregation(mode="prompt-mean", overlong_filter=True),
            correction=Correction(kind="sequence_mask", high=9.0),
            kl=KLTerm(coefficient=0.1),
        ),
        ValueLoss(clip=0.1, aggregation=Aggregation(mode="constant", constant=3)),
        SupervisedLoss(),
        PreferenceLoss(),
    ],
)
def test_losses_travel_and_take_what_an_engine_gives(loss: Any) -> None:
    """A copy from a pickle, called with TensorDicts of exactly the columns that the loss reads, in float32."""
    copy = pickle.loads(pickle.dumps(loss))
    assert copy == loss
    names = [name.removesuffix("?") for name in loss.reads]
    columns = random_columns(*names, seed=3) | {"response_mask": MASK}
    of_rows = {"group_tokens": torch.tensor([3.0, 1.0]), "finish_reason": torch.tensor([0, 1])}
    of_rows |= {"preference": torch.tensor([1.0, -1.0]), "partner_logratio": torch.zeros(2)}
    columns |= {name: column for name, column in of_rows.items() if name in names}
    outputs = {name: column.requires_grad_() for name, column in random_columns("logprobs", "values", seed=4).items()}
    wanted, wanted_metrics = loss(outputs, columns)
    batch = TensorDict(columns, batch_size=[2])
    found, metrics = copy(TensorDict(outputs, batch_size=[2]), batch)
    found.backward()
    assert metrics == wanted_metrics
    assert float(found.detach()) == float(wanted.detach())
    assert found.dtype == torch.float32
    assert copy.count(batch) == loss.count(columns) > 0
    assert all(type(number) is float for pair in metrics.values() for number in pair)
