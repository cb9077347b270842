"""The loss of supervised training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

__all__ = ["SupervisedLoss"]


@dataclass(frozen=True, kw_only=True)
class SupervisedLoss:
    """Cross-entropy of the response tokens: -sum logprobs."""

    def __call__(
        self, outputs: TensorDict, micro_batch: TensorDict
    ) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        """Reads ``logprobs`` of the outputs and ``response_mask`` of the batch, both [b, T]."""
        mask = micro_batch["response_mask"].bool()
        loss = -outputs["logprobs"].masked_fill(~mask, 0.0).sum()
        return loss, {"supervised/loss": (float(loss.detach()), float(mask.sum()))}
