"""Advantages against loops in numpy that follow the papers' formulas, one response at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_algorithms.advantages import GAE, compute_gae, compute_token_rewards, whiten

LENGTHS = [4, 1, 3]
MASK = torch.arange(4) < torch.tensor(LENGTHS)[:, None]


def random_columns(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    per_token = {
        name: torch.randn(3, 4, generator=generator) * MASK for name in ("old_logprobs", "ref_logprobs", "values")
    }
    return {**per_token, "scores": torch.randn(3, generator=generator), "response_mask": MASK}


def gae_of_one_response(rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """A_t = sum_l (gamma lambda)^l delta_{t+l}, written as the sum and not as the recursion."""
    following = np.append(values[1:], 0.0)
    delta = rewards + gamma * following - values
    length = len(rewards)
    return np.array(
        [sum((gamma * gae_lambda) ** step * delta[t + step] for step in range(length - t)) for t in range(length)]
    )


@given(seed=st.integers(0, 1000), gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
def test_gae_is_the_discounted_sum_of_residuals(seed: int, gamma: float, gae_lambda: float) -> None:
    columns = random_columns(seed)
    rewards = columns["old_logprobs"]
    found = compute_gae(rewards, columns["values"], MASK, gamma=gamma, gae_lambda=gae_lambda)
    for row, length in enumerate(LENGTHS):
        expected = gae_of_one_response(
            rewards[row, :length].numpy().astype(float),
            columns["values"][row, :length].numpy().astype(float),
            gamma,
            gae_lambda,
        )
        np.testing.assert_allclose(found[row, :length], expected, atol=1e-4)
        assert not found[row, length:].any()


def test_the_score_stands_on_the_last_response_token() -> None:
    rewards = compute_token_rewards(torch.tensor([1.0, 2.0, 3.0]), torch.full((3, 4), 0.5), MASK)
    expected = [[-0.5, -0.5, -0.5, 0.5], [1.5, 0, 0, 0], [-0.5, -0.5, 2.5, 0]]
    np.testing.assert_allclose(rewards, expected)


def test_whitening_sees_masked_elements_only() -> None:
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) * 7 + 3
    white = whiten(values, MASK)
    np.testing.assert_allclose(white[MASK].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(white[MASK].std(correction=0), 1, atol=1e-5)
    assert not white[~MASK].any()


def test_returns_are_advantages_plus_values_before_whitening() -> None:
    columns = random_columns(3)
    answer = GAE(gamma=0.9, gae_lambda=0.8, kl_coefficient=0.1)(columns)
    penalty = 0.1 * (columns["old_logprobs"] - columns["ref_logprobs"])
    rewards = compute_token_rewards(columns["scores"], penalty, MASK)
    plain = compute_gae(rewards, columns["values"], MASK, gamma=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(answer["returns"][MASK], (plain + columns["values"])[MASK], atol=1e-6)
    np.testing.assert_allclose(answer["advantages"], whiten(plain, MASK), atol=1e-6)


def test_values_and_decay_skip_the_tokens_between() -> None:
    """The issue's mask: seven of nine tokens are beyond the first trained ones, two of them trained."""
    mask = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 1, 1]]).bool()
    columns = {
        "response_mask": mask,
        "scores": torch.tensor([1.0]),
        "old_logprobs": torch.zeros(1, 9),
        "ref_logprobs": torch.zeros(1, 9),
        "values": torch.tensor([[0.1, 0.2, 9.0, 9.0, 9.0, 9.0, 9.0, 0.3, 0.4]]),
    }
    rewards = compute_token_rewards(columns["scores"], torch.zeros(1, 9), mask)
    assert rewards.tolist() == [[0.0] * 8 + [1.0]]
    found = compute_gae(rewards, columns["values"], mask, gamma=0.5, gae_lambda=0.5)
    last = 1.0 - 0.4
    before = 0.5 * 0.4 - 0.3 + 0.25 * last
    second = 0.5 * 0.3 - 0.2 + 0.25 * before
    first = 0.5 * 0.2 - 0.1 + 0.25 * second
    np.testing.assert_allclose(found[0], [first, second, 0, 0, 0, 0, 0, before, last], atol=1e-6)


def columns_with_holes(masks: list[list[bool]], seed: int) -> dict[str, torch.Tensor]:
    """Random columns; where the mask is False they hold what would spoil any sum."""
    mask = torch.tensor(masks, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    names = ("old_logprobs", "ref_logprobs", "values")
    per_token = {name: torch.randn(mask.shape, generator=generator).masked_fill(~mask, torch.nan) for name in names}
    return {**per_token, "scores": torch.randn(len(mask), generator=generator), "response_mask": mask}


masks_with_holes = st.integers(1, 9).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=5)
)


@settings(max_examples=60)
@given(masks=masks_with_holes, seed=st.integers(0, 1000), gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
def test_holes_are_as_if_their_tokens_were_dropped(
    masks: list[list[bool]], seed: int, gamma: float, gae_lambda: float
) -> None:
    columns = columns_with_holes(masks, seed)
    found = GAE(gamma=gamma, gae_lambda=gae_lambda, kl_coefficient=0.1)(columns)
    advantages, returns = [], []
    for row, mask in enumerate(masks):
        old, reference, values = (
            columns[name][row].numpy().astype(float)[mask] for name in ("old_logprobs", "ref_logprobs", "values")
        )
        rewards = -0.1 * (old - reference)
        rewards[-1:] += float(columns["scores"][row])
        advantages.append(gae_of_one_response(rewards, values, gamma, gae_lambda) if len(values) else values)
        returns.append(advantages[-1] + values)
    everything = np.concatenate(advantages)
    white = (everything - everything.mean()) / np.sqrt(everything.var() + 1e-8) if len(everything) else everything
    chosen = columns["response_mask"]
    np.testing.assert_allclose(found["returns"][chosen], np.concatenate(returns), atol=1e-4)
    if len(everything) < 2 or everything.std() > 1e-2:  # else the division magnifies float32's rounding
        np.testing.assert_allclose(found["advantages"][chosen], white, atol=1e-3)
    for column in found.values():
        assert not column[~chosen].any()


@pytest.mark.parametrize("width", [0, 3])
def test_a_batch_without_a_trained_token_has_zeros(width: int) -> None:
    found = GAE(kl_coefficient=0.1)(columns_with_holes([[False] * width] * 2, seed=0))
    assert {name: column.tolist() for name, column in found.items()} == {
        "advantages": [[0.0] * width] * 2,
        "returns": [[0.0] * width] * 2,
    }


def test_a_mask_of_numbers_is_a_mask() -> None:
    columns = columns_with_holes([[True, False, True], [False, True, False]], seed=1)
    found = GAE(kl_coefficient=0.1)({**columns, "response_mask": columns["response_mask"].long()})
    for name, column in GAE(kl_coefficient=0.1)(columns).items():
        assert torch.equal(found[name], column)
