"""Estimates of the KL divergence from samples of one policy, and the controller of its coefficient. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hf_protocols import ConfigError
from hf_protocols.validation import Checks

__all__ = ["AdaptiveKL", "estimate_kl"]

_check = Checks(ConfigError)

_LARGEST_ERROR = 0.2
_LARGEST_EXPONENT = 20.0


def estimate_kl(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Three estimates of KL(policy || other), in nats, of each token that the policy sampled (Schulman 2020).

    With d = logprobs - other_logprobs: `k1` = d has the KL as its mean, and may be negative, even averaged over a few
    samples: it is a difference, not a divergence. `k2` = d^2 / 2 has less variance and a bias. `k3` =
    exp(-d) - 1 + d has the mean of `k1` and is never negative; -d is cut at 20 in both terms.

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


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """Moves the coefficient so that the observed KL comes to `target` (Ziegler et al. 2019, section 2.2).

    c becomes c (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon), with n the sequences of the batch. `target` and the
    observed KL are of one kind, which the caller chooses: nats per token, or per sequence.

    Raises:
        ConfigError: for a target or a horizon of at most 0.
    """

    target: float
    horizon: float = 10_000
    """Sequences over which the coefficient may change by about 0.2 of itself."""

    def __post_init__(self) -> None:
        _check.number("kl_target", self.target)
        _check.number("kl_horizon", self.horizon)

    def update(self, coefficient: float, observed_kl: float, num_samples: int) -> float:
        """Returns the next coefficient, never below 0; a KL that is NaN changes nothing.

        Args:
            coefficient: in use for the batch.
            observed_kl: nats, an average over the batch.
            num_samples: sequences of the batch.
        """
        if math.isnan(observed_kl):
            return coefficient
        error = min(max(observed_kl / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        return max(coefficient * (1 + error * num_samples / self.horizon), 0.0)
