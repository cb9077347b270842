"""The loss of one training step: what the caller's function says of each micro-batch, added up."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from inspect import isroutine
from numbers import Real

import torch
from tensordict import TensorDict
from torch.autograd.graph import Node, get_gradient_edge

from hf_engine.backends.base import LossFunction, Metrics
from hf_engine.training.micro_batches import MicroBatch, SequenceBatch
from hf_protocols.errors import BackendError, HybridFlowError
from hf_protocols.foreign_code import Caught
from hf_protocols.metrics import merge_metrics
from hf_protocols.validation import show

__all__ = ["STEP_METRICS", "StepLoss"]

STEP_METRICS = ("grad_norm", "learning_rate", "skipped_nonfinite", "batch/padding", "batch/shared")
"""Metrics that every step adds to those of its loss function."""


class StepLoss:
    """Calls a loss function on micro-batches and keeps the sums.

    Refuses a result of another type, and a result from which no gradient can be taken. An error does not leave the
    backward pass, in which the other ranks wait for this one: it is kept, and the loss is zero from then on.

    Args:
        loss_fn: see `TrainBackend.train_step`.
        sequences: this rank's rows, whose columns it reads.
        device: where it computes.
    """

    def __init__(self, loss_fn: LossFunction, sequences: SequenceBatch, device: torch.device) -> None:
        self._device = device
        self._loss_fn = loss_fn
        self._sequences = sequences
        self.total = 0.0
        """Sum of the micro-batches' losses so far."""
        self.metrics: Metrics = {}
        """(sum, count) by name."""
        self.error: HybridFlowError | None = None
        """The first error of the function or of its results."""

    def of(self, micro_batch: MicroBatch, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch, a scalar. It is zero for a dummy and after an error; the pass goes on.

        Args:
            micro_batch: rows of the batch, or a dummy.
            outputs: [b, T] each, by name.
        """
        if len(micro_batch.rows) and self.error is None:
            with Caught() as caught:
                return self._compute(micro_batch, outputs)
            self.error = _as_ours(caught.error, _name(self._loss_fn))
        return torch.stack([output.sum() * 0.0 for output in outputs.values()]).sum()

    def _compute(self, micro_batch: MicroBatch, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        columns = {name: c.to(self._device) for name, c in self._sequences.padded_columns(micro_batch).items()}
        size = [len(micro_batch.rows)]
        label = _name(self._loss_fn)
        answer = self._loss_fn(TensorDict({**outputs}, batch_size=size), TensorDict(columns, batch_size=size))
        loss_sum, metrics = _read(answer, label)
        if not _reaches(loss_sum, outputs):
            raise BackendError(f"{label} gave a loss_sum whose gradient reaches no output. Compute it from the outputs")
        self.total += float(loss_sum.detach())
        self.metrics = merge_metrics([self.metrics, metrics])
        return loss_sum


def _reaches(loss_sum: torch.Tensor, outputs: Mapping[str, torch.Tensor]) -> bool:
    """Returns True if a gradient of the loss arrives at an output."""
    wanted = {get_gradient_edge(output).node for output in outputs.values() if output.requires_grad}
    seen: set[Node] = set()
    waiting = [get_gradient_edge(loss_sum).node]
    while waiting:
        node = waiting.pop()
        if node in wanted:
            return True
        if node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
    return False


def _as_ours(error: BaseException | None, label: str) -> HybridFlowError:
    if isinstance(error, HybridFlowError):
        return error
    ours = BackendError(f"{label} raised {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours


def _name(loss_fn: object) -> str:
    """The loss in messages: the argument's name, and the class of an object, which the user may have written."""
    wrapped = getattr(loss_fn, "__wrapped__", loss_fn)
    return "loss_fn" if isroutine(wrapped) or isinstance(wrapped, partial) else f"loss_fn {type(wrapped).__name__}"


def _read(answer: object, label: str) -> tuple[torch.Tensor, Metrics]:
    """The loss, and the metrics as numbers: tensors would keep every micro-batch's graph until the step's end."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        given = (
            f"a {type(answer).__name__} of {len(answer)}" if isinstance(answer, tuple | list) else _described(answer)
        )
        raise BackendError(
            f"{label} gave {given}. Return (loss_sum, metrics): a tensor of one number, and (sum, count) by name"
        )
    loss_sum, metrics = answer
    _check_loss(loss_sum, label)
    if not isinstance(metrics, Mapping):
        raise BackendError(f"{label} gave {_described(metrics)} as metrics. Return (sum, count) by name, or {{}}")
    return loss_sum, {name: _read_metric(name, pair, label) for name, pair in metrics.items()}


def _read_metric(name: object, pair: object, label: str) -> tuple[float, float]:
    if not isinstance(name, str):
        raise BackendError(f"{label} gave {show(name)} as a metric's name. Name metrics by strings")
    if name in STEP_METRICS:
        taken = ", ".join(STEP_METRICS)
        raise BackendError(
            f"{label}'s metric {show(name)} has a name that the step itself uses ({taken}). Give it another"
        )
    numbers = [_number(each) for each in pair] if isinstance(pair, tuple | list) else []
    if len(numbers) != 2 or None in numbers:
        raise BackendError(f"{label} gave {_described(pair)} as metric {show(name)}. Return (sum, count), two numbers")
    value, count = numbers
    assert value is not None and count is not None
    return value, count


def _number(value: object) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, Real) else None


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _check_loss(loss_sum: object, label: str) -> None:
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1:
        wanted = "Return a tensor of one number, the sum over the tokens"
        raise BackendError(f"{label} gave {_described(loss_sum)} as loss_sum. {wanted}")
    if not loss_sum.requires_grad:
        raise BackendError(
            f"{label} gave a loss_sum without gradient. Compute it from the outputs, without detach() or no_grad()"
        )
