"""A policy that generates and is not trained."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hf_controller import Worker
from hf_engine import load_rollout_backend
from hf_protocols import THREE_D_ALL_MICRO_DP, register

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_controller import WorkerContext
    from hf_engine import SamplingParams

__all__ = ["GeneratorWorker"]


class GeneratorWorker(Worker):
    """One rank of a rollout backend with the weights of a model directory.

    Args:
        model: directory or hub name.
        rollout: name of a `hf_engine.rollout_backends` entry point.
        rollout_options: more of what its `build` takes.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        model: str,
        rollout: str,
        rollout_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(context)
        build = load_rollout_backend(rollout).build
        self._rollout = build(model, topology=context.topology, seed=context.seed, **rollout_options)

    @register(
        protocol=THREE_D_ALL_MICRO_DP,
        rows="times",
        reads=("row_id", "prompt_ids"),
        writes=("response_ids", "response_mask", "rollout_logprobs", "finish_reason", "weight_version"),
        kind="generation",
    )
    def generate_sequences(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        """Draws `sampling.n` responses to every prompt; the samples of a prompt come one after another."""
        return self._rollout.generate(batch, sampling)

    def close(self) -> None:
        """Frees the backend."""
        self._rollout.close()
