"""The transition into an engine that keeps its weights itself: of all weights, or of adapters where it has the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from hf_engine.backends.base import RolloutBackend, TrainBackend
from hf_engine.backends.capabilities import SupportsAdapters, SupportsAdapterUpdates, SupportsShardLoading
from hf_engine.hybrid_engine.transitions import (
    CheckedWeights,
    MovedWeights,
    TransitionMemory,
    WeightNeed,
    WeightTransition,
)
from hf_engine.models.adapter_rules import is_adapter_name
from hf_engine.process_groups import local_device
from hf_engine.resharding.execute import Parts, Weights
from hf_engine.resharding.streaming import ShardStream

if TYPE_CHECKING:
    from hf_engine.resharding.plan import ReshardPlan

__all__ = ["StreamedTransition"]


class _Loading(RolloutBackend, SupportsShardLoading, Protocol):
    pass


class StreamedTransition(WeightTransition):
    """Hands shards over to the rollout backend, some parameters at a time. Its memory is released between blocks.

    Args:
        train: the training backend.
        rollout: the rollout backend; with adapters apart in the plan it may be `SupportsAdapterUpdates`.
        plan: from the one's layout to the other's.
        group: the ranks that send to each other, as in `ReshardExecutor`.
        bucket_bytes: bound on the communication buffers, and on the shards that are on their way at once.
        offloads: the training weights wait on the host during generation.
        verify_transfers: as in `ReshardExecutor`.
    """

    def __init__(
        self,
        train: TrainBackend,
        rollout: _Loading,
        plan: ReshardPlan,
        *,
        group: dist.ProcessGroup | None,
        bucket_bytes: int,
        offloads: bool,
        verify_transfers: bool,
    ) -> None:
        super().__init__(train, rollout, plan, offloads=offloads)
        self._loading = rollout
        options: dict[str, Any] = {
            "group": group,
            "bucket_bytes": bucket_bytes,
            "device": local_device(),
            "verify_transfers": verify_transfers,
        }
        self._stream = ShardStream(plan, **options)
        self._adapters: tuple[SupportsAdapterUpdates, ShardStream] | None = None
        self._names = [name for name in plan.target.shapes if is_adapter_name(name)]
        if self._names and isinstance(rollout, SupportsAdapterUpdates) and isinstance(train, SupportsAdapters):
            self._adapters = rollout, ShardStream(plan.select(self._names), **options)
        self._base: int | None = None
        """Loads of the training backend's base when the engine got it; None where the engine's is not known."""
        self._fed_bytes = 0
        self._engine_bytes, self._loading_bytes = rollout.engine_bytes, rollout.staging_bytes
        self._released_bytes = rollout.release()

    def find_need(self, *, is_stale: bool) -> WeightNeed:
        if not is_stale:
            return WeightNeed.NONE
        needs_base = self._adapters is None or self._base is None or self._base != self._base_changes
        return WeightNeed.ALL if needs_base else WeightNeed.ADAPTERS

    def forget(self) -> None:
        self._base = None

    def check(self, weights: Weights) -> CheckedWeights:
        return CheckedWeights(self._stream.check(weights), {})

    def enter(self, version: int, checked: CheckedWeights | None, need: WeightNeed) -> MovedWeights:
        moved = MovedWeights()
        with ExitStack() as undo:
            undo.callback(self.forget)
            if checked is not None:
                received = self._feed(checked.source, version, need)
                self._commit(version)
                self._base = self._base_changes
                moved = MovedWeights(received, self._fed_bytes)
            if self._offloads:
                self._train.offload(weights=True)
            self._rollout.resume()
            undo.pop_all()
        return moved

    def leave(self, *, failed: bool) -> None:
        """Gives the memory back to training.

        An engine may free its memory together with other ranks. A rank that failed alone must not wait for them: the
        memory is then freed after the next block.
        """
        try:
            if not failed:
                self._released_bytes = self._rollout.release()
        finally:
            if self._offloads:
                self._train.reload()

    def measure(self) -> TransitionMemory:
        trained = self._plan.source.held_bytes(dist.get_rank())
        streams = [self._stream] if self._adapters is None else [self._stream, self._adapters[1]]
        return TransitionMemory(
            generation_bytes=0,
            engine_bytes=self._engine_bytes,
            released_bytes=self._released_bytes,
            training="offloaded" if self._offloads else "kept",
            training_bytes=0 if self._offloads else trained,
            host_bytes=trained if self._offloads else 0,
            peak_bytes=trained,
            staging_bytes=sum(stream.staging_bytes for stream in streams) + self._loading_bytes,
        )

    def _feed(self, weights: Parts, version: int, need: WeightNeed) -> int:
        """Sends this rank's weights and feeds the engine; see `ShardStream.exchange`. Returns the bytes received."""
        self._fed_bytes, self._base = 0, None
        if need == WeightNeed.ALL or self._adapters is None:
            self._loading.begin_weights()
            return self._stream.exchange(weights, self._load, version=version)
        engine, stream = self._adapters
        engine.begin_adapters()
        return stream.exchange(weights, self._load, version=version)

    def _load(self, shards: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._fed_bytes += sum(part.nbytes for parts in shards.values() for part in parts)
        self._loading.load_shards(shards)

    @property
    def _base_changes(self) -> int:
        return self._train.base_changes if isinstance(self._train, SupportsAdapters) else 0
