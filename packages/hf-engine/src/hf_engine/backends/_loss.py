"""The loss of one training step: what the caller's function says of each micro-batch, added up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict

from hf_engine.backends._base import LossFunction
from hf_engine.backends._micro_batches import MicroBatch, SequenceBatch
from hf_protocols.errors import BackendError

__all__ = ["StepLoss"]


class StepLoss:
    """Calls a loss function on micro-batches and keeps the sums.

    Args:
        loss_fn: see `TrainBackend.train_step`.
        sequences: this rank's rows, whose columns it reads.
        device: where it computes.
    """

    def __init__(self, loss_fn: LossFunction, sequences: SequenceBatch, device: torch.device) -> None:
        self._loss_fn = loss_fn
        self._sequences = sequences
        self._device = device
        self.total = 0.0
        """Sum of the micro-batches' losses so far."""
        self.metrics: dict[str, tuple[float, float]] = {}
        """(sum, count) by name."""

    def of(self, micro_batch: MicroBatch, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch, a scalar; a dummy's is zero and keeps the backward pass in step.

        Args:
            micro_batch: rows of the batch, or a dummy.
            outputs: [b, T] each, by name.

        Raises:
            BackendError: for a loss from which no gradient can be taken.
        """
        if not len(micro_batch.rows):
            return torch.stack([output.sum() * 0.0 for output in outputs.values()]).sum()
        columns = {name: c.to(self._device) for name, c in self._sequences.padded_columns(micro_batch).items()}
        size = [len(micro_batch.rows)]
        loss_sum, metrics = self._loss_fn(
            TensorDict({**outputs}, batch_size=size), TensorDict(columns, batch_size=size)
        )
        _check_loss(loss_sum)
        self.total += float(loss_sum.detach())
        for name, (value, count) in metrics.items():
            total, counted = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (total + value, counted + count)
        return loss_sum


def _check_loss(loss_sum: object) -> None:
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1:
        shape = f"a tensor of shape {tuple(loss_sum.shape)}" if isinstance(loss_sum, torch.Tensor) else repr(loss_sum)
        raise BackendError(f"loss_fn gave {shape} as loss_sum: give a tensor of one number, the sum over the tokens")
    if not loss_sum.requires_grad:
        raise BackendError(
            "loss_fn gave a loss_sum without gradient: compute it from the outputs, without detach() or no_grad()"
        )
