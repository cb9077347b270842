"""The contract of training and rollout backends: their Protocols, the values that cross them, and the registry.

What lives here: `base` and `abilities`, configurations, columns as tensors, checks of `build`, and supported versions.
What must not: a backend, which is in `training` or `rollout`, and anything that imports a backend's library.
"""

from __future__ import annotations

from hf_engine.backends.abilities import (
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
from hf_engine.backends.base import (
    Head,
    LossFunction,
    Metrics,
    RolloutBackend,
    SamplingParams,
    TrainBackend,
    TrainConfig,
)
from hf_engine.backends.lora_config import LoraConfig
from hf_engine.backends.registry import (
    available_rollout_backends,
    available_train_backends,
    load_rollout_backend,
    load_train_backend,
)

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
    "load_rollout_backend",
    "load_train_backend",
]
