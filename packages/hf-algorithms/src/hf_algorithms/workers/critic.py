"""The critic: values of states, trained in addition to the actor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_algorithms.replay import record_call
from hf_algorithms.workers._after import add_positions, find_room, split_positions
from hf_algorithms.workers._model import SEQUENCE, Metrics, on_device
from hf_algorithms.workers._trained import TrainedWorker
from hf_protocols import THREE_D, register

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_algorithms.losses import Loss
    from hf_algorithms.value_scale import ValueScale

__all__ = ["CriticWorker"]


class CriticWorker(TrainedWorker):
    """One rank of the critic: the model's trunk with a scalar head."""

    head = "value"
    learning_rate_key = "critic_learning_rate"

    @register(protocol=THREE_D, reads=SEQUENCE, writes=("values",), kind="inference")
    @on_device
    def compute_values(self, batch: TensorDict, *, scale: ValueScale | None = None) -> TensorDict:
        """`values`, jagged [B, T]: the value before each response token was drawn, in the unit of rewards.

        Args:
            batch: prompts and responses.
            scale: between the model's output and values; None: they are the same.
        """
        found = self._train.compute_values(batch)
        if scale is not None:
            found["values"] = scale.restore(found["values"])
        return found

    @register(protocol=THREE_D, reads=SEQUENCE, writes=("values", "next_values"), kind="inference")
    @on_device
    def compute_values_after(
        self, batch: TensorDict, *, max_tokens: int, scale: ValueScale | None = None
    ) -> TensorDict:
        """`values` as `compute_values`, and `next_values` float32 [B]: the value after the last token of a response.

        Args:
            batch: prompts and responses.
            max_tokens: a response of as many tokens has no room for one more value, which is NaN then.
            scale: as for `compute_values`.
        """
        has_room = find_room(batch, max_tokens)
        found = self._train.compute_values(add_positions(batch, has_room))
        column = found["values"] if scale is None else scale.restore(found["values"])
        found["values"], found["next_values"] = split_positions(column, has_room)
        return found

    @register(protocol=THREE_D, returns="metrics", reads=(*SEQUENCE, "next_values?", "next_returns?"), kind="training")
    @on_device
    @record_call
    def update_critic(self, batch: TensorDict, loss: Loss) -> Metrics:
        """One optimizer step on `loss`; with `next_returns` also on the position after the last token."""
        if "next_returns" in batch:
            has_room = ~batch["next_returns"].isnan()
            beyond = {name: batch[f"next_{name}"] for name in ("values", "returns") if name in batch}
            batch = add_positions(batch, has_room, beyond)
        return self._update(batch, loss)
