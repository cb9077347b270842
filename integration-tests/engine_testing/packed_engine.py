"""An engine that nobody can read: it takes shards, keeps its weights to itself, and may lose some on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hf_engine.backends.base import SamplingParams
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.rollout.transformers import TransformersBackend

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["PackedEngine"]


class PackedEngine:
    """A real engine behind a wall.

    Args:
        inner: the engine; its weights are written, and shown to nobody.
        spoils_from: the update, counted from 1, from which on the last parameter arrives with the wrong sign.
    """

    def __init__(self, inner: TransformersBackend, spoils_from: int | None = None) -> None:
        self._inner, self._spoils_from = inner, spoils_from
        self._spoiled = list(inner.weight_buffers())[-1]
        self._missing: set[str] = set()
        self._num_updates = 0

    @property
    def engine_bytes(self) -> int:
        """Of the weights."""
        return sum(buffer.nbytes for buffer in self._inner.weight_buffers().values())

    @property
    def staging_bytes(self) -> int:
        """Nothing: shards are written where they stay."""
        return 0

    @property
    def weight_version(self) -> int:
        """Of the inner engine."""
        return self._inner.weight_version

    def weight_layout(self) -> WeightLayout:
        """Of the inner engine."""
        return self._inner.weight_layout()

    def begin_weights(self) -> None:
        """Waits for all parameters."""
        self._missing = set(self._inner.weight_buffers())
        self._num_updates += 1

    def load_shards(self, shards: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Writes whole parameters, right or wrong."""
        is_wrong = self._spoils_from is not None and self._num_updates >= self._spoils_from
        for name, (part,) in shards.items():
            with torch.no_grad():
                self._inner.weight_buffers()[name].copy_(-part if is_wrong and name == self._spoiled else part)
            self._missing.remove(name)

    def commit_weights(self, version: int) -> None:
        """All have come."""
        assert not self._missing
        self._inner.commit_weights(version)

    def generate(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        """From the weights as they are."""
        return self._inner.generate(batch, sampling)

    def release(self) -> int:
        """Frees nothing."""
        return 0

    def resume(self) -> None:
        """It has kept its weights."""

    def close(self) -> None:
        """Closes the inner engine."""
        self._inner.close()
