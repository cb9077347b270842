"""The loss of one training step: what the caller's function says of each micro-batch, added up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from tensordict import TensorDict

from hf_engine.backends._base import LossFunction
from hf_engine.backends._micro_batches import MicroBatch, SequenceBatch
from hf_engine.resharding.agreement import refuse_together
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
        self._refusal: Exception | None = None

    def of(self, micro_batch: MicroBatch, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch, a scalar; a dummy's is zero and keeps the backward pass in step.

        So is it once the loss function failed: other ranks wait for this one in every micro-batch, and hear of it from
        `agree`.

        Args:
            micro_batch: rows of the batch, or a dummy.
            outputs: [b, T] each, by name.
        """
        if len(micro_batch.rows) and self._refusal is None:
            try:
                return self._evaluate(micro_batch, outputs)
            except Exception as error:  # noqa: BLE001 - the caller's code may raise anything
                self._refusal = error
        return torch.stack([output.sum() * 0.0 for output in outputs.values()]).sum()

    def agree(self, group: dist.ProcessGroup) -> None:
        """Refuses the step on every rank of the group if the loss function failed on any. Collective.

        Raises:
            BackendError: for a loss from which no gradient can be taken, or that failed on another rank, which it
                names. Where the function itself raised, its own error.
        """
        failed = torch.tensor([self._refusal is not None], dtype=torch.int32, device=self._device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
        if failed.item():
            ranks = dist.get_process_group_ranks(group)
            refuse_together(self._refusal, group, ranks, BackendError, "no rank took the step")

    def _evaluate(self, micro_batch: MicroBatch, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
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
