"""The transition into weights that a rollout backend lets others write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import torch.distributed as dist

from hf_engine.backends.base import RolloutBackend, TrainBackend
from hf_engine.backends.capabilities import SupportsPadding, SupportsWeightAdoption, SupportsWeightBuffers
from hf_engine.hybrid_engine.transitions import (
    CheckedWeights,
    MovedWeights,
    TransitionMemory,
    WeightNeed,
    WeightTransition,
)
from hf_engine.process_groups import local_device
from hf_engine.resharding.execute import ReshardExecutor, Weights, as_parts
from hf_engine.resharding.moving import ShardMover

if TYPE_CHECKING:
    from hf_engine.resharding.plan import ReshardPlan

__all__ = ["InPlaceTransition"]


class _Writable(RolloutBackend, SupportsWeightBuffers, Protocol):
    pass


class InPlaceTransition(WeightTransition):
    """Writes generation shards into the rollout backend's own tensors.

    A training shard that is moved lies inside them during generation; one that is kept or offloaded does not.

    Args:
        train: the training backend.
        rollout: the rollout backend, which releases its memory until the first `enter`.
        plan: from the one's layout to the other's.
        group: the ranks that send to each other, as in `ReshardExecutor`.
        bucket_bytes: bound on the communication buffers.
        training_weights: as in `HybridEngine`.
        verify_transfers: as in `ReshardExecutor`.
    """

    def __init__(
        self,
        train: TrainBackend,
        rollout: _Writable,
        plan: ReshardPlan,
        *,
        group: dist.ProcessGroup | None,
        bucket_bytes: int,
        training_weights: Literal["move", "keep", "offload"] | None,
        verify_transfers: bool,
    ) -> None:
        super().__init__(train, rollout, plan, offloads=training_weights == "offload")
        self._writable = rollout
        self._executor = ReshardExecutor(
            plan,
            group=group,
            bucket_bytes=bucket_bytes,
            device=local_device(),
            verify_transfers=verify_transfers,
        )
        self._is_local = not plan.messages
        self._mover: ShardMover | None = None
        if training_weights == "move" or (training_weights is None and plan.source.dtype == plan.target.dtype):
            weights, buffers = as_parts(train.local_weights()), as_parts(rollout.weight_buffers())
            adopt = rollout.adopt_weights if isinstance(rollout, SupportsWeightAdoption) else None
            padding = train.padding() if isinstance(train, SupportsPadding) else ()
            self._mover = ShardMover(plan, dist.get_rank(), weights, buffers, adopt=adopt, padding=padding)
            rollout.release()

    @property
    def is_silent(self) -> bool:
        return self._mover is not None and self._is_local

    def find_need(self, *, is_stale: bool) -> WeightNeed:
        # Moved weights do not stay in generation.
        return WeightNeed.ALL if is_stale or self._mover is not None else WeightNeed.NONE

    def check(self, weights: Weights) -> CheckedWeights:
        buffers = self._writable.weight_buffers()
        return CheckedWeights(*self._executor.check(weights, buffers, are_filled=self._mover is None))

    def enter(self, version: int, checked: CheckedWeights | None, need: WeightNeed) -> MovedWeights:
        moved = MovedWeights()
        if checked is not None:
            received = self._executor.exchange(*checked, version=version, mover=self._mover).recv_bytes
            self._commit(version)
            moved = MovedWeights(received)
        if self._offloads:
            self._train.offload(weights=True)
        return moved

    def leave(self, *, failed: bool) -> None:
        try:
            if self._mover is not None:
                self._mover.restore()
                self._rollout.release()
        finally:
            if self._offloads:
                self._train.reload()

    def measure(self) -> TransitionMemory:
        rank = dist.get_rank()
        held, trained = self._plan.target.held_bytes(rank), self._plan.source.held_bytes(rank)
        has_moved = self._mover is not None
        return TransitionMemory(
            generation_bytes=held,
            engine_bytes=0,
            released_bytes=held if has_moved else 0,
            training="moved" if has_moved else "offloaded" if self._offloads else "kept",
            training_bytes=0 if has_moved or self._offloads else trained,
            host_bytes=trained if self._offloads else self._mover.host_bytes if self._mover is not None else 0,
            peak_bytes=trained + held if self._mover is None else self._executor.peak_bytes(self._mover),
            staging_bytes=self._executor.buffer_bytes,
        )
