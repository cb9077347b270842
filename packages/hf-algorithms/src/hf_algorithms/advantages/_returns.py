"""Token rewards, discounted sums and whitening over one whole batch, padded to [B, T]. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from hf_algorithms.kl import estimate_kl

__all__ = ["compute_gae", "compute_penalty", "compute_token_rewards", "find_last", "spread_scores", "whiten"]

KLEstimator = Literal["k1", "k2", "k3"]
KLReturn = Literal["token", "cumulative"]


def find_last(mask: torch.Tensor) -> torch.Tensor:
    """Returns bool [B, T], True on the last trained token of each row; a row without any stays False."""
    mask = mask.bool()
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)


def compute_penalty(
    columns: Mapping[str, torch.Tensor], *, coefficient: float, estimator: KLEstimator = "k1"
) -> torch.Tensor:
    """Returns coefficient * KL estimate of each trained token, [B, T] in nats, 0 elsewhere.

    A coefficient of 0 reads only `response_mask` and `scores`; otherwise `old_logprobs` and `ref_logprobs` too.
    Estimators as in `hf_algorithms.kl.estimate_kl`.
    """
    mask = columns["response_mask"]
    if not coefficient:
        return columns["scores"].new_zeros(mask.shape)
    old, reference = columns["old_logprobs"], columns["ref_logprobs"]
    penalty = torch.zeros_like(old)
    penalty[mask] = (coefficient * estimate_kl(old[mask], reference[mask])[estimator]).to(old.dtype)
    return penalty


def compute_token_rewards(scores: torch.Tensor, penalty: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-penalty on every trained token, plus the response's score on its last trained token.

    Args:
        scores: [B].
        penalty: [B, T].
        mask: [B, T], True or not 0 on trained tokens. Observation tokens between or after them are False, like
            padding; a row without any True has no rewards.
    """
    return (-penalty).masked_fill(~mask.bool(), 0.0) + scores[:, None].masked_fill(~find_last(mask), 0.0)


def compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    last_values: torch.Tensor | None = None,
) -> torch.Tensor:
    """A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t (Schulman et al. 2016, eq. 16).

    All [B, T]. t + 1 is the next token that the mask marks: observation tokens in between are skipped, with their
    values and rewards, and gamma and lambda decay once per marked token. Beyond the last one A is zero, and V is zero
    or the row's entry in `last_values` [B].
    """
    mask = mask.bool()
    advantages = torch.zeros_like(rewards)
    next_advantage = rewards.new_zeros(len(rewards))
    next_value = next_advantage if last_values is None else last_values
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    return advantages.masked_fill(~mask, 0.0)


def spread_scores(
    scores: torch.Tensor, penalty: torch.Tensor, mask: torch.Tensor, *, gamma: float, kl_return: KLReturn
) -> torch.Tensor:
    """Returns the return of every trained token, [B, T], for a score that is paid at the last one.

    `cumulative`: sum over u >= t of gamma^(u-t) (score at the last token - penalty_u), the policy gradient of both.
    `token`: the discounted score minus the penalty of token t alone, as in ReMax's and slime's code.

    Args:
        scores: [B], finite.
        penalty: [B, T], coefficient times KL.
        mask: [B, T], trained tokens.
        gamma: discount per trained token.
        kl_return: where the penalty enters.
    """
    inside = penalty if kl_return == "cumulative" else torch.zeros_like(penalty)
    rewards = compute_token_rewards(scores, inside, mask)
    returns = compute_gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0)
    return returns if kl_return == "cumulative" else (returns - penalty).masked_fill(~mask.bool(), 0.0)


def whiten(values: torch.Tensor, mask: torch.Tensor, *, ddof: int = 0, eps: float = 1e-8) -> torch.Tensor:
    """Mean 0 and variance 1 over all masked elements of [B, T]; elsewhere 0.

    Statistics are computed in float64: the mean of equal float32 numbers may differ from them by rounding.

    Args:
        values: [B, T].
        mask: [B, T], the population: trained tokens of the whole batch, without observation tokens.
        ddof: 0 divides the sum of squares by N, 1 by N - 1. N elements with N <= ddof become 0.
        eps: is added to the variance, inside the root.
    """
    mask = mask.bool()
    chosen = values[mask].double()
    white = torch.zeros_like(values)
    if len(chosen) <= ddof or chosen.amax() == chosen.amin():
        return white
    scale = (chosen.var(correction=ddof) + eps).sqrt()
    white[mask] = ((chosen - chosen.mean()) / scale).to(values.dtype)
    return white
