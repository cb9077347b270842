"""Training and rollout backends: `_base` says what they are, each other module is the only importer of its library."""

from __future__ import annotations

from hf_engine.backends._abilities import (
    AdoptsWeights,
    ChecksAdapters,
    ChecksLayout,
    ChecksOptions,
    ChecksRows,
    DrawsItself,
    FormsReplicas,
    HoldsPadding,
    SupportsAdapters,
    SupportsAdapterUpdates,
    SupportsBufferLoading,
    SupportsBuffers,
    SupportsModelCheck,
    SupportsScores,
    SupportsShardLoading,
    SupportsWeightBuffers,
    TakesAdapters,
)
from hf_engine.backends._adapter_rules import find_merging_reason
from hf_engine.backends._base import (
    Head,
    LossFunction,
    Metrics,
    RolloutBackend,
    SamplingParams,
    TrainBackend,
    TrainConfig,
)
from hf_engine.backends._lora_config import LoraConfig
from hf_engine.backends._merging import merge_adapter
from hf_engine.backends._registry import (
    available_rollout_backends,
    available_train_backends,
    load_rollout_backend,
    load_train_backend,
)
from hf_engine.backends._shapes import derive_shape

__all__ = [
    "AdoptsWeights",
    "ChecksAdapters",
    "ChecksLayout",
    "ChecksOptions",
    "ChecksRows",
    "DrawsItself",
    "FormsReplicas",
    "Head",
    "HoldsPadding",
    "LoraConfig",
    "LossFunction",
    "Metrics",
    "RolloutBackend",
    "SamplingParams",
    "SupportsAdapterUpdates",
    "SupportsAdapters",
    "SupportsBufferLoading",
    "SupportsBuffers",
    "SupportsModelCheck",
    "SupportsScores",
    "SupportsShardLoading",
    "SupportsWeightBuffers",
    "TakesAdapters",
    "TrainBackend",
    "TrainConfig",
    "available_rollout_backends",
    "available_train_backends",
    "derive_shape",
    "find_merging_reason",
    "load_rollout_backend",
    "load_train_backend",
    "merge_adapter",
]
