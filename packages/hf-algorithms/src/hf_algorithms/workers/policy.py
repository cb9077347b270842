"""A policy that learns: log-probs of given responses, and optimizer steps on a loss of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_algorithms.replay import record_call
from hf_algorithms.workers._model import SEQUENCE, Metrics, on_device
from hf_algorithms.workers._trained import TrainedWorker
from hf_engine import SupportsAdapters
from hf_protocols import THREE_D, NonFiniteLossError, register

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_algorithms.losses import Loss

__all__ = ["PolicyWorker"]


class PolicyWorker(TrainedWorker):
    """One rank of a policy on a training backend; it generates nothing."""

    @register(protocol=THREE_D, reads=SEQUENCE, writes=("old_logprobs",), kind="inference")
    @on_device
    def compute_logprobs(self, batch: TensorDict, *, temperature: float = 1.0, keep_graph: bool = False) -> TensorDict:
        """`old_logprobs` of the response tokens, jagged [B, T], under the current weights.

        Args:
            batch: prompts and responses.
            temperature: divides the logits; give the sampler's.
            keep_graph: says that the next update is on the same rows in the same order. If every rank has few tokens,
                the update goes on from this pass, which is kept for it.

        Raises:
            NonFiniteLossError: for log-probs that are not finite.
        """
        return self._compute_logprobs(batch, temperature, keep_graph=keep_graph)

    @register(protocol=THREE_D, returns="metrics", reads=SEQUENCE, kind="training")
    @on_device
    @record_call
    def update_actor(self, batch: TensorDict, loss: Loss, *, temperature: float = 1.0) -> Metrics:
        """One optimizer step on `loss`, which names the columns it reads.

        Without a trained token on any rank the weights stay, and `ROLE/skipped_steps` is reported.
        """
        return self._update(batch, loss, temperature=temperature)

    @register(protocol=THREE_D, reads=SEQUENCE, writes=("ref_logprobs",), kind="inference")
    @on_device
    def compute_base_logprobs(self, batch: TensorDict, *, temperature: float = 1.0) -> TensorDict:
        """`ref_logprobs` of the response tokens, jagged [B, T], with the adapters of `[model.lora]` off.

        These are a reference's that started from the same model, without a second copy of it.
        """
        assert isinstance(self._train, SupportsAdapters), "of a run with [model.lora]"
        with self._train.adapters_off():
            found = self._train.compute_logprobs(batch, temperature=temperature)
        return found.rename_key_("logprobs", "ref_logprobs")

    def _compute_logprobs(self, batch: TensorDict, temperature: float, *, keep_graph: bool) -> TensorDict:
        keeps = self._may_keep(keep_graph)
        found = self._train.compute_logprobs(batch, temperature=temperature, keep_graph=keeps)
        found.rename_key_("logprobs", "old_logprobs")
        if not bool(found["old_logprobs"].values().isfinite().all()):
            if steps := self._train.optimizer_steps:
                cause = f"after {steps} optimizer steps: weights have diverged. Lower the learning rate"
            else:
                cause = (
                    "before any update: the model's files hold weights that are not finite, or too large for the dtype"
                )
            raise NonFiniteLossError(f"the policy's log-probs are not finite {cause}")
        return found
