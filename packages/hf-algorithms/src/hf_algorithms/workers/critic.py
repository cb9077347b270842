"""The critic: values of states, trained beside the actor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_algorithms.workers._model import SEQUENCE, Metrics, ModelWorker, on_device
from hf_protocols import THREE_D, register

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_algorithms.losses import Loss
    from hf_algorithms.value_scale import ValueScale

__all__ = ["CriticWorker"]


class CriticWorker(ModelWorker):
    """One rank of the critic: the model's trunk with a scalar head."""

    head = "value"
    learning_rate_key = "critic_learning_rate"

    @register(protocol=THREE_D, reads=SEQUENCE, writes=("values",), kind="inference")
    @on_device
    def compute_values(self, batch: TensorDict, *, scale: ValueScale | None = None) -> TensorDict:
        """``values``, jagged [B, T]: the value before each response token was drawn, in the unit of rewards.

        Args:
            batch: prompts and responses.
            scale: between the model's output and values; None: they are the same.
        """
        found = self._train.compute_values(batch)
        if scale is not None:
            found["values"] = scale.restore(found["values"])
        return found

    @register(protocol=THREE_D, returns="metrics", reads=SEQUENCE, kind="training")
    @on_device
    def update_critic(self, batch: TensorDict, loss: Loss) -> Metrics:
        """One optimizer step on ``loss``."""
        return self._update(batch, loss)
