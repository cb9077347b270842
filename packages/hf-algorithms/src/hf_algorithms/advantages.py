"""Advantages: pure functions over one whole batch, padded to [B, T]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GAE", "compute_gae", "compute_token_rewards", "whiten"]


@dataclass(frozen=True, kw_only=True)
class GAE:
    """Generalized advantage estimation with a KL penalty in the token rewards."""

    gamma: float = 1.0
    gae_lambda: float = 0.95
    kl_coefficient: float = 0.0

    def __call__(self, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Reads ``scores`` [B]; ``old_logprobs``, ``ref_logprobs``, ``values``, ``response_mask`` [B, T].

        Returns whitened ``advantages`` and the ``returns`` before whitening, both [B, T], 0 where the mask is False.
        """
        mask, values = columns["response_mask"].bool(), columns["values"]
        penalty = self.kl_coefficient * (columns["old_logprobs"] - columns["ref_logprobs"])
        rewards = compute_token_rewards(columns["scores"], penalty, mask)
        advantages = compute_gae(rewards, values, mask, gamma=self.gamma, gae_lambda=self.gae_lambda)
        return {"advantages": whiten(advantages, mask), "returns": (advantages + values).masked_fill(~mask, 0.0)}


def compute_token_rewards(scores: torch.Tensor, penalty: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-penalty on every trained token, plus the response's score on its last trained token.

    Args:
        scores: [B].
        penalty: [B, T].
        mask: [B, T], True or not 0 on trained tokens. Observation tokens between or after them are False, like
            padding; a row without any True has no rewards.
    """
    mask = mask.bool()
    following = mask.flip(1).cumsum(1).flip(1)
    is_last = mask & (following == 1)
    return (-penalty).masked_fill(~mask, 0.0) + scores[:, None].masked_fill(~is_last, 0.0)


def compute_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t (Schulman et al. 2016, eq. 16).

    All [B, T]. t + 1 is the next token that the mask marks: observation tokens in between are skipped, with their
    values and rewards, and gamma and lambda decay once per marked token. Beyond the last one V and A are zero.
    """
    mask = mask.bool()
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    return advantages.masked_fill(~mask, 0.0)


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean 0 and variance 1 over all masked elements of [B, T]; elsewhere 0."""
    mask = mask.bool()
    chosen = values[mask]
    if not len(chosen):
        return torch.zeros_like(values)
    white = (values - chosen.mean()) * torch.rsqrt(chosen.var(unbiased=False) + 1e-8)
    return white.masked_fill(~mask, 0.0)
