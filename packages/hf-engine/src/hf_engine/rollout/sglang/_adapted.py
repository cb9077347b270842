"""The rollout backend of an engine that computes adapters next to their base."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hf_engine.backends.lora_config import LoraConfig
from hf_engine.models.adapter_rules import is_adapter_name
from hf_engine.resharding.boxes import Box
from hf_engine.rollout.sglang._adapters import ADAPTER, describe_adapter
from hf_engine.rollout.sglang._backend import SglangBackend
from hf_engine.rollout.sglang._staging import REPORT_BYTES
from hf_protocols.errors import BackendError

__all__ = ["AdaptedSglangBackend"]


class AdaptedSglangBackend(SglangBackend):
    """`SglangBackend` of an engine with one adapter, whose factors every rank holds whole; the first rank's are sent.

    Args:
        lora: settings of the adapter.
        adapted: names of the layers that have it.
        options: of `SglangBackend`.
    """

    def __init__(self, *given: Any, lora: LoraConfig, adapted: Collection[str], **options: Any) -> None:
        super().__init__(*given, **options)
        self._lora = lora
        self._config = describe_adapter(lora, adapted)
        self._factors: dict[str, torch.Tensor] = {}
        self._has_base = True

    def held_adapters(self) -> LoraConfig | None:
        """Settings of the adapters; see `TakesAdapters`."""
        return self._lora

    @property
    def staging_bytes(self) -> int:
        """As that of other engines; the adapter passes the same memory at once."""
        sizes = [self._staged_bytes(name) for name in self._layout.shapes if is_adapter_name(name)]
        return max(super().staging_bytes, REPORT_BYTES + sum(sizes)) + sum(sizes)

    def begin_weights(self) -> None:
        """Starts an update of all; see `SupportsShardLoading`."""
        self._factors, self._has_base = {}, False
        super().begin_weights()

    def begin_adapters(self) -> None:
        """Starts an update of the adapters alone; see `SupportsAdapterUpdates`."""
        self._check_open()
        if not self._has_base:
            raise BackendError("begin_adapters needs a complete base: call begin_weights")
        self._factors, self._is_complete = {}, False
        self._loaded = {name for name in self._layout.shapes if not is_adapter_name(name)}

    def _load_parts(self, shards: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._factors |= {name: parts[0] for name, parts in shards.items() if is_adapter_name(name)}
        super()._load_parts({name: parts for name, parts in shards.items() if name not in self._factors})

    def _end_update(self) -> None:
        if not self._has_base:
            super()._end_update()
        boxes = {name: Box.whole(tuple(part.shape)) for name, part in self._factors.items()}
        shapes = {name: box.shape for name, box in boxes.items()}
        with self._replica.together("put_adapter"):
            filled = self._staging.fill(self._factors, shapes=shapes, boxes=boxes) if self._factors else ""
        self._call("put_adapter", ADAPTER, filled, self._config)
        self._requested = {"adapter": ADAPTER}
        self._factors, self._has_base = {}, True
