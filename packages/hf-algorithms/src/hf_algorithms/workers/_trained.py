"""A model that learns: updates of a recipe, and the two halves of an optimizer step for loops that users write."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hf_algorithms.jagged import pad_rows
from hf_algorithms.losses import Aggregation, find_loss
from hf_algorithms.replay import Recorder
from hf_algorithms.users_code import describe_raised
from hf_algorithms.workers._model import Metrics, ModelWorker, on_device
from hf_algorithms.workers._outputs import read_outputs
from hf_controller import WorkerContext
from hf_protocols import ONE_TO_ALL, THREE_D, BackendError, BatchError, register
from hf_protocols.foreign_code import raised_as

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDict

    from hf_algorithms.losses import Loss

__all__ = ["TrainedWorker"]

_OUTPUT_OPTIONS = {"entropy": "entropy", "candidate_logprobs": "candidates"}
"""Arguments of `train_step` that ask for more outputs, by the output's name."""


class TrainedWorker(ModelWorker):
    """One rank of a model with an optimizer.

    Args:
        recorder: records updates that fail; None: none is recorded.
    """

    records_updates = True
    """A run passes a `recorder` to the constructor, if that takes one."""

    def __init__(self, context: WorkerContext, *, recorder: Recorder | None = None, **kwargs: Any) -> None:
        self.recorder = recorder
        self.has_recorded = False
        self.pretraining: TensorDict | None = None
        super().__init__(context, **kwargs)

    def save_state_apart(self, path: str) -> None:
        """Writes the state without touching one that is still written. Collective; see `TrainBackend.save_state`."""
        self._train.save_state(path, weight_version=self._weight_version(), apart=True)

    @register(protocol=THREE_D, returns="metrics", kind="training")
    @on_device
    def forward_backward(
        self,
        batch: TensorDict,
        loss: Loss | Callable[..., Any] | str,
        denominator: float | None = None,
        *,
        temperature: float = 1.0,
    ) -> Metrics:
        """Adds the gradients of a loss to those that wait for `optim_step`; calls add up.

        Any error drops the gradients of all calls since the last step. Loading a model drops them too.

        Args:
            batch: `prompt_ids`, `response_ids` and the columns that the loss reads. All of its columns travel.
            loss: an object of `hf_algorithms.losses`; the name of one, see `find_loss`; or a function
                `loss(outputs, batch) -> (loss_sum, {name: (sum, count)})`.
            denominator: divides the loss summed over all ranks. None: the trained tokens of this batch, or what the
                loss counts.
            temperature: divides the logits; pass the one with which the responses were drawn.

        Raises:
            ConfigError: for a name that no loss has, or outputs that the model lacks.
            BatchError: without a denominator, for a batch in which nothing is trained.
            BackendError: for any exception of the loss, with its file and line; the group can be called again.
        """
        found = find_loss(loss, self.head) if isinstance(loss, str) else loss
        if denominator is None:
            tokens, denominator = self._train.sum_over_data([_count_trained(found, batch), _count(found, batch)])
            if not tokens or not denominator:
                raise BatchError(
                    f"{self.context.role}.forward_backward: the batch has no trained token. Pass rows whose "
                    "response_mask is True somewhere, or a denominator"
                )
        options = self._options_for(found)
        metrics = self._train.forward_backward(
            batch, self._telling(found), denominator, temperature=temperature, **options
        )
        return self._name(metrics)

    @register(protocol=ONE_TO_ALL, returns="metrics", kind="training")
    @on_device
    def optim_step(self) -> Metrics:
        """Takes one optimizer step on the gradients of all `forward_backward` calls since the last one.

        Returns:
            `ROLE/grad_norm`, before clipping, and `ROLE/learning_rate`.

        Raises:
            BackendError: if no gradients wait.
            NonFiniteLossError: if a loss or the gradient norm is not finite; weights are as before.
        """
        metrics = self._name(self._train.optim_step())
        self._note_step(metrics)
        return metrics

    def _telling(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss with errors that say whose it is and where it failed."""
        role = self.context.role

        @functools.wraps(loss, updated=())
        def call(outputs: TensorDict, batch: TensorDict) -> Any:
            with raised_as(lambda error: BackendError(f"{role}: the loss raised {describe_raised(error)}")):
                return loss(outputs, batch)

        return call

    def _note_step(self, metrics: Metrics) -> None:
        """Called with the metrics of each optimizer step, to which it may add."""

    def _update(
        self, batch: TensorDict, loss: Loss, *, temperature: float = 1.0, pretrain_weight: float = 0.0
    ) -> Metrics:
        """One optimizer step on the loss of all ranks' rows. Without a trained token there is no step."""
        held, self.pretraining = self.pretraining, None
        options = self._options_for(loss)
        tokens, count, learned = self._train.sum_over_data(
            [_count_trained(loss, batch), _count(loss, batch), 0.0 if held is None else _count_tokens(held)]
        )
        if not tokens or not count:
            return {f"{self.context.role}/skipped_steps": (1.0, 1.0)}
        if held is not None and learned:
            from hf_algorithms.workers._pretraining import join_pretraining

            batch, loss = join_pretraining(batch, loss, held, weight=pretrain_weight * count / learned)
        metrics = self._train.train_step(batch, self._telling(loss), count, temperature=temperature, **options)
        return self._name(metrics)

    def _options_for(self, loss: object) -> dict[str, bool]:
        """Arguments of the backend for the outputs that a loss asks for."""
        asked = read_outputs(loss, self.head)
        return {key: True for name, key in _OUTPUT_OPTIONS.items() if name in asked}

    def _name(self, metrics: Metrics) -> Metrics:
        """The metrics under the role's name."""
        return {name if "/" in name else f"{self.context.role}/{name}": pair for name, pair in metrics.items()}


def _count_tokens(batch: TensorDict) -> float:
    return float(pad_rows(batch["response_mask"]).sum())


def _count_trained(loss: object, batch: TensorDict) -> float:
    """This rank's tokens, or pairs, that the loss trains: a denominator of constants counts rows without any, too."""
    if "response_mask" not in batch:
        return float(len(batch))
    aggregation = getattr(loss, "aggregation", None)
    if not isinstance(aggregation, Aggregation):
        return _count_tokens(batch)
    return float(aggregation.select({str(name): batch[name] for name, _ in batch.items()}).sum())


def _count(loss: object, batch: TensorDict) -> float:
    """This rank's share of the loss's denominator; of a loss without `count`, its trained tokens, or pairs."""
    count = getattr(loss, "count", None)
    if count is None:
        return _count_tokens(batch) if "response_mask" in batch else float(len(batch))
    return float(count({str(name): batch[name] for name, _ in batch.items()}))
