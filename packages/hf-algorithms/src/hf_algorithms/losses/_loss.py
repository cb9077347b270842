"""Interface of a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

__all__ = ["Columns", "Loss", "LossOfOutputs", "Metrics"]

Columns = Mapping[str, torch.Tensor]
"""[b, T] or [b] each, by name; a dict or a TensorDict."""

Metrics = dict[str, tuple[float, float]]
"""(sum, count) by name; of a name that ends in `_max` the largest."""


class Loss(Protocol):
    """A frozen object that an engine calls on every micro-batch of an optimizer step.

    It is given `logprobs`, or `values` of a value head, unless it is a `LossOfOutputs`.
    """

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns of the batch; one whose name ends in `?` may be absent."""

    def __call__(self, outputs: Columns, micro_batch: Columns) -> tuple[torch.Tensor, Metrics]:
        """Returns the weighted sum of the token losses, a scalar, and metrics.

        Args:
            outputs: of the model, with the gradient: [b, T] each, `candidate_logprobs` [b, T, k].
            micro_batch: the columns of `reads`, padded.
        """

    def count(self, columns: Columns) -> float:
        """Returns these rows' share of the number by which the sum over all micro-batches and ranks is divided.

        Args:
            columns: those of `reads`, padded or jagged.
        """


class LossOfOutputs(Loss, Protocol):
    """A loss that names the outputs it reads."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Outputs of the model.

        A language model has `logprobs` of the sampled tokens; `entropy` of their distributions, in nats; and
        `candidate_logprobs`, of the tokens in the column `candidate_ids`, jagged [B, tokens, k].
        """
