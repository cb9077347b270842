"""The clipped policy loss of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["PPOPolicyLoss"]


@dataclass(frozen=True, kw_only=True)
class PPOPolicyLoss:
    """max(-A r, -A clip(r, 1 - c, 1 + c)), r = exp(logprobs - old_logprobs) (Schulman et al. 2017, eq. 7)."""

    clip_range: float = 0.2

    def __call__(
        self, outputs: TensorDict, micro_batch: TensorDict
    ) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        """Reads ``logprobs`` of the outputs; ``old_logprobs``, ``advantages``, ``response_mask``, all [b, T]."""
        mask = micro_batch["response_mask"]
        advantages = micro_batch["advantages"]
        log_ratio = (outputs["logprobs"] - micro_batch["old_logprobs"]).masked_fill(~mask, 0.0)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        loss = torch.maximum(-advantages * ratio, -advantages * clipped).masked_fill(~mask, 0.0).sum()
        with torch.no_grad():
            count = float(mask.sum())
            outside = ((ratio - 1).abs() > self.clip_range) & mask
            metrics = {
                "actor/policy_loss": (float(loss), count),
                "actor/clip_fraction": (float(outside.sum()), count),
                # Schulman's k3 estimate: unbiased, never negative
                "actor/update_kl": (float((ratio - 1 - log_ratio).sum()), count),
            }
        return loss, metrics
