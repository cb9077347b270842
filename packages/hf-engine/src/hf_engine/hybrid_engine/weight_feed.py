"""Feeding an engine that keeps its weights itself: with everything, or with adapters alone where it has their base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hf_engine.backends.abilities import SupportsAdapters, SupportsAdapterUpdates, SupportsShardLoading
from hf_engine.models.adapter_rules import is_adapter_name
from hf_engine.resharding.digest import compute_digests
from hf_engine.resharding.execute import Weights, as_parts
from hf_engine.resharding.plan import ReshardPlan
from hf_engine.resharding.streaming import ShardStream

if TYPE_CHECKING:
    import torch.distributed as dist

    from hf_engine.backends.base import TrainBackend

__all__ = ["WeightFeed"]


class WeightFeed:
    """Brings shards into a rollout backend, group by group.

    Args:
        train: the training backend.
        rollout: the rollout backend; with adapters apart in the plan it may be `SupportsAdapterUpdates`.
        plan: from the one's layout to the other's.
        group: as in `ReshardExecutor`.
        bucket_bytes: bound on the communication buffers, and on the shards that are on their way at once.
        device: where both live.
    """

    def __init__(
        self,
        train: TrainBackend,
        rollout: SupportsShardLoading,
        plan: ReshardPlan,
        *,
        group: dist.ProcessGroup | None,
        bucket_bytes: int,
        device: torch.device | str,
    ) -> None:
        self._train, self._rollout = train, rollout
        self._stream = ShardStream(plan, group=group, bucket_bytes=bucket_bytes, device=device)
        self._adapters: ShardStream | None = None
        self._is_whole, self._fed_bytes = True, 0
        self._base: int | None = None
        self._names = [name for name in plan.target.shapes if is_adapter_name(name)]
        if self._names and isinstance(rollout, SupportsAdapterUpdates) and isinstance(train, SupportsAdapters):
            part = plan.select(self._names)
            self._adapters = ShardStream(part, group=group, bucket_bytes=bucket_bytes, device=device)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the communication buffers and of the largest group's tensors."""
        streams = (self._stream,) if self._adapters is None else (self._stream, self._adapters)
        return sum(stream.staging_bytes for stream in streams)

    @property
    def needs_base(self) -> bool:
        """True unless the engine has the training backend's base, and takes adapters on it."""
        return self._adapters is None or self._base is None or self._base != self._base_changes

    @property
    def fed_bytes(self) -> int:
        """Bytes that the engine was handed on this rank in the last feed."""
        return self._fed_bytes

    def digest(self, weights: Weights) -> int:
        """A number of the bits of this rank's weights; of a base that does not change only its loads are counted."""
        parts = as_parts(weights)
        names = parts if self._adapters is None else self._names
        tensors = [part for name in names for part in parts.get(name, ())]
        return hash((self._base_changes, *compute_digests(tensors)))

    def begin(self, *, whole: bool) -> None:
        """Starts an update of the engine's weights.

        Args:
            whole: of all; else of the adapters, which is for a feed that does not need the base on any rank.
        """
        self._is_whole, self._fed_bytes, self._base = whole, 0, None
        if whole:
            self._rollout.begin_weights()
        else:
            assert isinstance(self._rollout, SupportsAdapterUpdates), "the base is needed else"
            self._rollout.begin_adapters()

    def run(self, weights: Weights, *, version: int) -> int:
        """Sends this rank's weights and feeds the engine; see `ShardStream.run`. Returns the bytes received."""
        if self._is_whole or self._adapters is None:
            return self._stream.run(weights, self._take, version=version)
        sent = {name: weights[name] for name in self._names if name in weights}
        return self._adapters.run(sent, self._take, version=version)

    def finish(self) -> None:
        """Notes that what was fed is committed."""
        self._base = self._base_changes

    def forget(self) -> None:
        """Feeds everything the next time: what the engine holds is not known."""
        self._base = None

    @property
    def _base_changes(self) -> int:
        return self._train.base_changes if isinstance(self._train, SupportsAdapters) else 0

    def _take(self, shards: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._fed_bytes += sum(part.nbytes for parts in shards.values() for part in parts)
        self._rollout.load_shards(shards)
