"""The actor: the policy that generates and is trained."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hf_algorithms.workers._model import SEQUENCE, Metrics, ModelWorker
from hf_engine import HybridEngine, SamplingParams, load_rollout_backend
from hf_protocols import ONE_TO_ALL, THREE_D, THREE_D_ALL_MICRO_DP, register

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_controller import WorkerContext
    from hf_engine import TrainConfig
    from hf_engine.backends import LossFunction

__all__ = ["ActorWorker"]


class ActorWorker(ModelWorker):
    """One rank of the policy: a training backend and a generation backend joined by a hybrid engine.

    Args:
        rollout: name of a ``hf_engine.rollout_backends`` entry point.
    """

    def __init__(
        self, context: WorkerContext, *, model: str, backend: str, training: TrainConfig, rollout: str
    ) -> None:
        super().__init__(context, model=model, backend=backend, training=training)
        generator = load_rollout_backend(rollout).build(model, topology=context.topology, seed=context.seed)
        self._engine = HybridEngine(self._train, generator, context.topology)

    @register(
        protocol=THREE_D_ALL_MICRO_DP,
        rows="times",
        reads=("row_id", "prompt_ids"),
        writes=("response_ids", "response_mask", "rollout_logprobs", "finish_reason", "weight_version"),
    )
    def generate_sequences(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        """``sampling.n`` responses to every prompt, drawn from the current weights.

        Returns:
            B * n rows, the n samples of a prompt one after another.
        """
        with ExitStack() as stack:
            with self.context.span("reshard"):
                stack.enter_context(self._engine.generation())
            with self.context.span("generate"):
                return self._engine.generate(batch, sampling)

    @register(protocol=THREE_D, reads=SEQUENCE, writes=("old_logprobs",))
    def compute_logprobs(self, batch: TensorDict, *, temperature: float = 1.0) -> TensorDict:
        """``old_logprobs`` of the response tokens, jagged [B, T], under the current weights."""
        return self._train.compute_logprobs(batch, temperature=temperature).rename_key_("logprobs", "old_logprobs")

    @register(
        protocol=THREE_D,
        returns="metrics",
        reads=(*SEQUENCE, "old_logprobs?", "ref_logprobs?", "advantages?"),
    )
    def update_actor(self, batch: TensorDict, loss: LossFunction, *, temperature: float = 1.0) -> Metrics:
        """One optimizer step on ``loss``."""
        return self._update(batch, loss, temperature=temperature)

    @register(protocol=ONE_TO_ALL, returns="object")
    def set_learning_rate(self, learning_rate: float) -> None:
        """Use ``learning_rate`` from the next step on."""
        self._train.set_learning_rate(learning_rate)

    @register(protocol=ONE_TO_ALL, returns="object")
    def describe_transition(self) -> dict[str, Any]:
        """Weight version, seconds and bytes received of this rank's last transition."""
        return {"weight_version": self._engine.weight_version, "last_transition": self._engine.last_transition}

    def close(self) -> None:
        """Free both backends."""
        self._engine.close()
