"""Advantages against loops in numpy that follow the papers' formulas, one response at a time."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
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
