"""The loss of supervised training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hf_algorithms.losses._aggregation import Aggregation
from hf_algorithms.losses._loss import Metrics

__all__ = ["SupervisedLoss"]


@dataclass(frozen=True, kw_only=True)
class SupervisedLoss:
    """Aggregates the cross-entropy of the response tokens, -lp."""

    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns of the batch."""
        return self.aggregation.reads

    def count(self, columns: Mapping[str, torch.Tensor]) -> float:
        """Returns these rows' share of the denominator; see `Aggregation.count`."""
        return self.aggregation.count(columns)

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], micro_batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Metrics]:
        """Returns the weighted sum of the token losses, and `supervised/loss`, aggregated.

        Args:
            outputs: `logprobs` [b, T], with the gradient.
            micro_batch: the columns of `reads`, padded.
        """
        mask = self.aggregation.select(micro_batch)
        logprobs = outputs["logprobs"].masked_fill(~mask, 0.0)
        loss = -(self.aggregation.weigh(mask, micro_batch).to(logprobs.dtype) * logprobs).sum()
        return loss, {"supervised/loss": (float(loss.detach()), self.aggregation.count(micro_batch))}
