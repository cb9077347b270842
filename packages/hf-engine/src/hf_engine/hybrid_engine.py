"""The colocated transition: one set of ranks trains and generates, the weights change their layout in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from hf_engine.backends._base import RolloutBackend, SamplingParams, SupportsWeightBuffers, TrainBackend
from hf_engine.process_groups import local_device, wait_for_device
from hf_engine.resharding.execute import DEFAULT_BUCKET_BYTES, ReshardExecutor, check_weights
from hf_engine.resharding.plan import ReshardPlan, plan_reshard
from hf_protocols.errors import BackendError
from hf_protocols.topology import Topology

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["HybridEngine", "Transition"]


@dataclass(frozen=True, kw_only=True)
class Transition:
    """What one entry into generation did on this rank."""

    weight_version: int
    """Version of the weights that generation sees."""
    seconds: float
    """Wall time; 0 where nothing had to move."""
    recv_bytes: int
    """Bytes received from other ranks."""


class HybridEngine:
    """Moves the weights of a training backend into a rollout backend on the same ranks (paper, section 5).

    Example:
        with engine.generation():
            responses = engine.generate(prompts, SamplingParams(max_new_tokens=64))

    Args:
        train: the training backend.
        rollout: a rollout backend of the same model that exposes its weights.
        topology: the ranks of both.
        bucket_bytes: bound on the bytes sent, and on those received, at once.
        release_weights: free the rollout's weights after every generation, at the price of a transfer before the
            next one even if nothing changed.

    Raises:
        BackendError: if the rollout backend does not expose its weights, or has another topology.
        ReshardError: if names or shapes of the two differ, or the rollout's tensors do not match its layout.
    """

    def __init__(
        self,
        train: TrainBackend,
        rollout: RolloutBackend,
        topology: Topology,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        release_weights: bool = False,
    ) -> None:
        if not isinstance(rollout, SupportsWeightBuffers):
            raise BackendError(f"{type(rollout).__name__} does not expose its weights (weight_buffers)")
        plan = plan_reshard(train.weight_layout(), rollout.weight_layout())
        if plan.ranks != tuple(range(topology.world_size)):
            raise BackendError(
                f"the two backends are on the ranks {plan.ranks}, the topology has {topology.world_size}"
            )
        check_weights(plan.target, dist.get_rank(), rollout.weight_buffers(), "generation")
        self._train = train
        self._rollout = rollout
        self._buffers: SupportsWeightBuffers = rollout
        self._release_weights = release_weights
        self._plan = plan
        self._executor = ReshardExecutor(plan, bucket_bytes=bucket_bytes, device=local_device())
        self._weight_version = rollout.weight_version
        self._weight_changes = train.weight_changes
        self._is_current = False
        self._is_generating = False
        self._last_transition: Transition | None = None

    @property
    def plan(self) -> ReshardPlan:
        """What every rank keeps, sends and receives in a transition."""
        return self._plan

    @property
    def weight_version(self) -> int:
        """Grows by one whenever generation sees weights that changed since it last ran."""
        return self._weight_version

    @property
    def last_transition(self) -> Transition | None:
        """The last entry into generation on this rank; None before the first."""
        return self._last_transition

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Brings the current training weights into the rollout backend. Collective over all ranks.

        Nothing moves if the training weights did not change since the last time.

        Raises:
            ReshardError: if a transfer fails; the training weights are intact.
        """
        start = time.perf_counter()
        received = 0
        moves = not self._is_current or self._train.weight_changes != self._weight_changes
        if moves:
            received = self._transfer()
        seconds = time.perf_counter() - start if moves else 0.0
        self._last_transition = Transition(weight_version=self._weight_version, seconds=seconds, recv_bytes=received)
        self._is_generating = True
        try:
            yield
        finally:
            self._is_generating = False
            if self._release_weights:
                self._rollout.release()
                self._is_current = False

    def generate(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        """Draws responses from the current weights; see `RolloutBackend.generate`.

        Raises:
            BackendError: outside `generation()`.
        """
        if not self._is_generating:
            raise BackendError("generate needs the current weights: call it inside `with engine.generation():`")
        return self._rollout.generate(batch, sampling)

    def close(self) -> None:
        """Frees both backends."""
        self._rollout.close()
        self._train.close()

    def _transfer(self) -> int:
        self._is_current = False
        if self._release_weights:
            self._rollout.resume()
        received = self._executor.run(self._train.local_weights(), self._buffers.weight_buffers())
        wait_for_device()
        changes = self._train.weight_changes
        self._weight_version += changes != self._weight_changes
        self._weight_changes = changes
        self._rollout.commit_weights(self._weight_version)
        self._is_current = True
        return received
