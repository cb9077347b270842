"""Estimates of the KL divergence from samples of one policy. Pure."""

from __future__ import annotations

import torch

__all__ = ["estimate_kl"]

_LARGEST_EXPONENT = 20.0


def estimate_kl(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Three estimates of KL(policy || other), in nats, of each token that the policy sampled (Schulman 2020).

    With d = logprobs - other_logprobs: ``k1`` = d, whose mean is the KL and which may be negative, also as a mean over
    few samples: it is a difference, not a divergence. ``k2`` = d^2 / 2 has less variance and a bias. ``k3`` =
    exp(-d) - 1 + d has the mean of ``k1`` and is never negative; -d is cut at 20 in both terms.

    Args:
        logprobs: the policy's.
        other_logprobs: of the same tokens and shape.

    Returns:
        float64, by name.
    """
    own, other = logprobs.double(), other_logprobs.double()
    difference = torch.where(own == other, 0.0, own - other)  # also where both are -inf
    exponent = (-difference).clamp(max=_LARGEST_EXPONENT)
    return {"k1": difference, "k2": difference.square() / 2, "k3": (torch.expm1(exponent) - exponent).clamp(min=0.0)}
