"""An optimizer step, and its two halves: the same for every training backend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist

from hf_engine.backends._agreement import refuse_non_finite
from hf_engine.backends._base import LossFunction, Metrics
from hf_engine.backends._loss import StepLoss
from hf_engine.backends._outputs import OutputRequest
from hf_engine.backends._state import KeepsState
from hf_engine.lost_peers import failures_end_all, lost_peers_are_errors
from hf_protocols.errors import BackendError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_engine.backends._learning_rate import LearningRate
    from hf_engine.backends._micro_batches import MicroBatch, SequenceBatch

__all__ = ["StepOptimizer", "TrainSteps"]


class StepOptimizer(Protocol):
    """The optimizer of a backend, as a step uses it."""

    learning_rate: LearningRate
    """Of every step."""
    steps: int
    """Steps taken."""

    @property
    def next_learning_rate(self) -> float:
        """The learning rate of the next step."""
        ...

    def step(self, grad_norm: float) -> None:
        """Clips the gradients by their global norm and steps. Collective."""
        ...

    def zero_grad(self) -> None:
        """Drops the gradients."""
        ...

    def continue_from(self, steps: int) -> None:
        """Counts on from a number of steps."""
        ...


class _Waiting(NamedTuple):
    """Gradients that wait for `optim_step`: the calls that added them, and the sum of this rank's losses."""

    calls: int = 0
    loss: float = 0.0


class TrainSteps(KeepsState):
    """`train_step`, `forward_backward` and `optim_step` of a backend; see `TrainBackend` for what they mean.

    A backend says how its gradients are added, and how their norm is found.

    Args:
        group: all its ranks, which pass a batch together.
    """

    _device: torch.device

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._waiting = _Waiting()

    @lost_peers_are_errors("train_step")
    def train_step(
        self,
        batch: TensorDict,
        loss_fn: LossFunction,
        denominator: float,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        candidates: bool = False,
    ) -> Metrics:
        """One optimizer step; see `TrainBackend.train_step`."""
        request = OutputRequest(temperature=temperature, entropy=entropy, candidates=candidates)
        metrics = self._accumulate("train_step", batch, loss_fn, denominator, request)
        return metrics | self._take_step("train_step")

    @lost_peers_are_errors("forward_backward")
    def forward_backward(
        self,
        batch: TensorDict,
        loss_fn: LossFunction,
        denominator: float,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        candidates: bool = False,
    ) -> Metrics:
        """Adds gradients; see `TrainBackend.forward_backward`."""
        request = OutputRequest(temperature=temperature, entropy=entropy, candidates=candidates)
        return self._accumulate("forward_backward", batch, loss_fn, denominator, request)

    @lost_peers_are_errors("optim_step")
    def optim_step(self) -> Metrics:
        """Steps on the gradients that wait; see `TrainBackend.optim_step`."""
        return self._take_step("optim_step")

    @abstractmethod
    def _prepare_step(self, method: str) -> StepOptimizer:
        """Refuses a frozen model, and one of which something is offloaded, in the name of a method."""

    @abstractmethod
    def _state_optimizer(self) -> StepOptimizer | None: ...

    @abstractmethod
    def _agreed_micro_batches(
        self,
        batch: TensorDict,
        request: OutputRequest,
        denominator: float,
        *,
        needs_rows: bool,
        loss_fn: LossFunction | None = None,
    ) -> tuple[SequenceBatch, list[MicroBatch]]:
        """This rank's rows, and as many micro-batches as every other rank has."""

    @abstractmethod
    def _add_gradients(
        self,
        loss: StepLoss,
        micro_batches: Sequence[MicroBatch],
        request: OutputRequest,
        denominator: float,
        *,
        is_first: bool,
    ) -> None:
        """Passes the micro-batches forward and backward. The first call of a step starts without gradients."""

    @abstractmethod
    def _measure(self, loss: float) -> tuple[float, float]:
        """The loss summed over all rows, and the global norm of the gradients. Collective."""

    def _shared(self, loss: StepLoss) -> tuple[float, Metrics]:
        """Sum and metrics of this rank's rows, where ranks without a loss function have them too."""
        return loss.total, loss.metrics

    def _accumulate(
        self, method: str, batch: TensorDict, loss_fn: LossFunction, denominator: float, request: OutputRequest
    ) -> Metrics:
        optimizer, waiting = self._prepare_step(method), self._waiting
        try:
            sequences, micro_batches = self._agreed_micro_batches(
                batch, request, denominator, needs_rows=True, loss_fn=loss_fn
            )
            loss = StepLoss(loss_fn, sequences, self._device)
            with failures_end_all(f"no rank took optimizer step {optimizer.steps + 1}"):
                self._add_gradients(loss, micro_batches, request, denominator, is_first=not waiting.calls)
            loss.agree(self._state_group, "no rank took the step")
            total, metrics = self._shared(loss)
        except BaseException:  # also an interrupt: what it left is no gradient of anything
            self._drop_gradients(optimizer)
            raise
        self._waiting = _Waiting(waiting.calls + 1, waiting.loss + total)
        return dict(metrics)

    def _take_step(self, method: str) -> Metrics:
        optimizer = self._prepare_step(method)
        if not self._waiting.calls:
            raise BackendError(
                f"{method}: no gradients have been computed since step {optimizer.steps}, or an error dropped them. "
                "Call forward_backward first"
            )
        try:
            total, grad_norm = self._measure(self._waiting.loss)
            refuse_non_finite(total, grad_norm, optimizer.steps)
            learning_rate = optimizer.next_learning_rate
            with failures_end_all(f"other ranks may have taken optimizer step {optimizer.steps + 1}"):
                optimizer.step(grad_norm)
        finally:
            self._drop_gradients(optimizer)
        self._weight_changes += 1
        return {"grad_norm": (grad_norm, 1.0), "learning_rate": (learning_rate, 1.0)}

    def _drop_gradients(self, optimizer: StepOptimizer | None) -> None:
        self._waiting = _Waiting()
        if optimizer is not None:
            optimizer.zero_grad()

    def _note_change(self) -> None:
        """Other weights are about to come: the gradients were of the old ones."""
        super()._note_change()
        self._drop_gradients(self._state_optimizer())
