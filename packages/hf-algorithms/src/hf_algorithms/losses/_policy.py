"""The clipped policy loss of PPO."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_algorithms.kl import estimate_kl

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["GAP_BOUND", "PPOPolicyLoss"]

GAP_BOUND = 0.1
"""Nats: log-probs are counted on which two engines differ by more. In float32 it is 1e-5, in bfloat16 0.01 to 0.05."""


_LARGEST_LOG_RATIO = 20.0
"""Beyond it exp overflows soon, and the gradient of an infinite ratio is NaN even where the clipped term is chosen."""


@dataclass(frozen=True, kw_only=True)
class PPOPolicyLoss:
    """max(-A r, -A clip(r, 1 - c, 1 + c)), r = exp(logprobs - old_logprobs) (Schulman et al. 2017, eq. 7).

    logprobs - old_logprobs is cut at -20 and 20, where its gradient ends.

    With ``ratio_cap`` a token whose ratio is above it weighs that much and no more (truncated importance sampling,
    Ionides 2008): its gradient is that of -A cap logprobs. For old log-probs of another engine, whose rare large ratios
    PPO's clipping lets through where the advantage is negative.
    """

    clip_range: float = 0.2
    ratio_cap: float | None = None

    def __call__(
        self, outputs: TensorDict, micro_batch: TensorDict
    ) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        """Reads ``logprobs`` of the outputs; ``old_logprobs``, ``advantages``, ``response_mask``, all [b, T].

        With ``ratio_cap`` the metrics have the sampler's mismatch: ``actor/sampler_gap`` is the mean over tokens of
        |logprobs - old_logprobs|, ``..._max`` the largest, ``..._share`` the share of tokens above `GAP_BOUND`. Later
        updates of an iteration add their own change of the policy.
        """
        mask = micro_batch["response_mask"].bool()
        advantages = micro_batch["advantages"].masked_fill(~mask, 0.0)
        log_ratio = (outputs["logprobs"] - micro_batch["old_logprobs"]).masked_fill(~mask, 0.0)
        bounded = log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        ratio = bounded.exp() if self.ratio_cap is None else _truncate(log_ratio, self.ratio_cap)
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        loss = torch.maximum(-advantages * ratio, -advantages * clipped).masked_fill(~mask, 0.0).sum()
        with torch.no_grad():
            count = float(mask.sum())
            outside = ((ratio - 1).abs() > self.clip_range) & mask
            metrics = {
                "actor/policy_loss": (float(loss), count),
                "actor/clip_fraction": (float(outside.sum()), count),
                # KL(old || new), sampled from the old policy
                "actor/update_kl": (float(estimate_kl(-log_ratio, torch.zeros_like(log_ratio))["k3"].sum()), count),
            }
            if self.ratio_cap is not None:
                truncated = (log_ratio.exp() > self.ratio_cap) & mask
                metrics["actor/truncated_fraction"] = (float(truncated.sum()), count)
                gaps = log_ratio.abs()
                metrics["actor/sampler_gap"] = (float(gaps.sum()), count)
                metrics["actor/sampler_gap_max"] = (float(gaps.max()), 1.0)
                metrics["actor/sampler_gap_share"] = (float((gaps > GAP_BOUND).sum()), count)
        return loss, metrics


def _truncate(log_ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """exp(log_ratio), above ``cap`` the value ``cap`` with the gradient of ``cap * log_ratio``."""
    below = log_ratio.clamp(max=math.log(cap)).exp()
    return torch.where(log_ratio > math.log(cap), cap * (log_ratio - log_ratio.detach()).exp(), below)
