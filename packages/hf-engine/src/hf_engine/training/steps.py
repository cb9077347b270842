"""An optimizer step, and its two halves: the same for every training backend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from hf_engine.agreement import together
from hf_engine.backends.base import LossFunction, Metrics, TrainConfig
from hf_engine.backends.gradients import with_gradients
from hf_engine.training.loss import StepLoss
from hf_engine.training.micro_batches import measure_work
from hf_engine.training.outputs import OutputRequest
from hf_engine.training.state.backend import KeepsState
from hf_protocols.errors import BackendError, HybridFlowError, NonFiniteLossError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_engine.training.learning_rate import LearningRate
    from hf_engine.training.micro_batches import MicroBatch, SequenceBatch

__all__ = ["StepOptimizer", "TrainSteps", "require_trainable"]


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


_OptimizerT = TypeVar("_OptimizerT")


def require_trainable(optimizer: _OptimizerT | None, method: str) -> _OptimizerT:
    """Returns the optimizer of a model, or refuses a frozen one in the name of a method."""
    if optimizer is None:
        raise BackendError(f"{method} needs a model built with trainable=True, this one is frozen")
    return optimizer


class _Waiting(NamedTuple):
    """Gradients that wait for `optim_step`: the calls that added them, and this rank's part of their loss."""

    calls: int = 0
    loss: float = 0.0
    error: HybridFlowError | None = None
    """An error of this rank's loss function, which the other ranks do not know yet."""


class TrainSteps(KeepsState):
    """`train_step`, `forward_backward` and `optim_step` of a backend; see `TrainBackend` for what they mean.

    A backend says how its gradients are added, and how their norm is found.

    Args:
        group: all its ranks, which pass a batch together.
        config: says what becomes of a step that is not finite.
    """

    _device: torch.device

    def __init__(self, group: dist.ProcessGroup, config: TrainConfig) -> None:
        super().__init__(group)
        self._waiting = _Waiting()
        self._on_nonfinite, self._explode_above = config.on_nonfinite, config.explode_above

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
        step = self._take_step("train_step")
        # The metrics of a loss that is not finite would be those of all steps they are averaged with.
        return metrics | step if "grad_norm" in step else step

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
        metrics = self._accumulate("forward_backward", batch, loss_fn, denominator, request)
        self._refuse_failed_loss()
        return metrics

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
    ) -> tuple[SequenceBatch, Sequence[MicroBatch]]:
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
    def _measure(self, loss: float, failed: bool) -> tuple[float, float, bool]:
        """The loss summed over all ranks, the global norm of the gradients, and whether the loss of any rank failed.

        Equal on all ranks. Collective.
        """

    def _shared(self, loss: StepLoss) -> tuple[float, Metrics, HybridFlowError | None]:
        """Sum, metrics and error of this rank's rows, where ranks without a loss function have them too."""
        return loss.total, loss.metrics, loss.error

    @with_gradients()
    def _accumulate(
        self, method: str, batch: TensorDict, loss_fn: LossFunction, denominator: float, request: OutputRequest
    ) -> Metrics:
        optimizer, waiting = self._prepare_step(method), self._waiting
        with ExitStack() as on_failure:
            on_failure.callback(self._drop_gradients, optimizer)  # a failed pass leaves a meaningless partial sum
            sequences, micro_batches = self._agreed_micro_batches(
                batch, request, denominator, needs_rows=True, loss_fn=loss_fn
            )
            loss = StepLoss(loss_fn, sequences, self._device)
            self._add_gradients(loss, micro_batches, request, denominator, is_first=not waiting.calls)
            total, metrics, error = self._shared(loss)
            on_failure.pop_all()
        self._waiting = _Waiting(waiting.calls + 1, waiting.loss + total / denominator, error)
        return {**metrics, **measure_work(micro_batches)}

    def _take_step(self, method: str) -> Metrics:
        optimizer = self._prepare_step(method)
        if not self._waiting.calls:
            raise BackendError(
                f"{method}: no gradients have been computed since step {optimizer.steps}, or an error dropped them. "
                "Call forward_backward first"
            )
        try:
            total, grad_norm, has_failed = self._measure(self._waiting.loss, self._waiting.error is not None)
            if has_failed:
                self._refuse_failed_loss()
            problem = self._find_problem(total, grad_norm)
            if problem is not None and self._on_nonfinite == "skip":
                return {"skipped_nonfinite": (1.0, 1.0)}
            if problem is not None:
                raise NonFiniteLossError(
                    f"optimizer step {optimizer.steps + 1} was refused: its loss is {total}, its gradient norm "
                    f"{grad_norm}: {problem}; the weights are still those of step {optimizer.steps}. Lower the "
                    "learning rate, look for extreme numbers in the batch, or leave such steps out by "
                    "training.on_nonfinite = 'skip'"
                )
            learning_rate = optimizer.next_learning_rate
            optimizer.step(grad_norm)
        finally:
            self._drop_gradients(optimizer)
        self._weight_changes += 1
        taken = {"skipped_nonfinite": (0.0, 1.0)} if self._on_nonfinite == "skip" else {}
        return {"grad_norm": (grad_norm, 1.0), "learning_rate": (learning_rate, 1.0), **taken}

    def _refuse_failed_loss(self) -> None:
        """Raises on every rank, and drops the gradients, if the loss function failed on any rank. Collective."""
        with ExitStack() as on_failure:
            on_failure.callback(self._drop_gradients, self._state_optimizer())
            with together("the gradients are dropped", self._state_group, device=self._device):
                if self._waiting.error is not None:
                    raise self._waiting.error
            on_failure.pop_all()

    def _find_problem(self, loss: float, grad_norm: float) -> str | None:
        """Returns why the step is not taken, or None. The numbers are equal on all ranks, so all decide alike."""
        if not (isfinite(loss) and isfinite(grad_norm)):
            return "not finite"
        if max(abs(loss), grad_norm) > self._explode_above:
            return f"above training.explode_above = {self._explode_above:g}"
        return None

    def _drop_gradients(self, optimizer: StepOptimizer | None) -> None:
        self._waiting = _Waiting()
        if optimizer is not None:
            optimizer.zero_grad()

    def _note_change(self) -> None:
        """Other weights are about to come: the gradients were of the old ones."""
        super()._note_change()
        self._drop_gradients(self._state_optimizer())
