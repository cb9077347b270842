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

        Returns whitened ``advantages`` and the ``returns`` before whitening, both [B, T].
        """
        mask = columns["response_mask"]
        penalty = self.kl_coefficient * (columns["old_logprobs"] - columns["ref_logprobs"])
        rewards = compute_token_rewards(columns["scores"], penalty, mask)
        advantages = compute_gae(rewards, columns["values"], mask, gamma=self.gamma, gae_lambda=self.gae_lambda)
        return {"advantages": whiten(advantages, mask), "returns": (advantages + columns["values"]) * mask}


def compute_token_rewards(scores: torch.Tensor, penalty: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-penalty on every response token, plus the response's score on its last one.

    Args:
        scores: [B].
        penalty: [B, T].
        mask: [B, T] bool, True on response tokens, which are the first ones of a row; at least one a row.
    """
    rewards = -penalty * mask
    last = mask.sum(dim=1) - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def compute_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t (Schulman et al. 2016, eq. 16).

    All [B, T]; beyond the last response token V and A are zero.
    """
    advantages = torch.zeros_like(rewards)
    values = values * mask
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * gae_lambda * next_advantage) * mask[:, t]
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean 0 and variance 1 over all masked elements of [B, T]; elsewhere 0."""
    chosen = values[mask]
    return (values - chosen.mean()) * torch.rsqrt(chosen.var(unbiased=False) + 1e-8) * mask
