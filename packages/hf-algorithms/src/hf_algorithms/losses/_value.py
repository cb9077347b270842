"""The clipped value loss of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["PPOValueLoss"]


@dataclass(frozen=True, kw_only=True)
class PPOValueLoss:
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), the value loss of the paper's first release."""

    clip_range: float = 0.2

    def __call__(
        self, outputs: TensorDict, micro_batch: TensorDict
    ) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        """Reads ``values`` of the outputs; ``values``, ``returns``, ``response_mask`` of the batch, all [b, T]."""
        mask = micro_batch["response_mask"].bool()
        columns = (outputs["values"], micro_batch["values"], micro_batch["returns"])
        # Before anything is computed: the gradient of a masked NaN would be NaN.
        values, old, returns = (column.masked_fill(~mask, 0.0) for column in columns)
        clipped = torch.clamp(values, old - self.clip_range, old + self.clip_range)
        squared = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
        loss = 0.5 * squared.sum()
        with torch.no_grad():
            count = float(mask.sum())
            error = ((returns - values) ** 2).sum()
            metrics = {"critic/value_loss": (float(loss), count), "critic/squared_error": (float(error), count)}
        return loss, metrics
