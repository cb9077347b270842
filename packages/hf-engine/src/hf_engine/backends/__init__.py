"""Training and rollout backends: `_base` says what they are, each other module is the only importer of its library."""

from __future__ import annotations

from hf_engine.backends._abilities import (
    AdoptsWeights,
    ChecksLayout,
    ChecksOptions,
    ChecksRows,
    DrawsItself,
    FormsReplicas,
    HoldsPadding,
    Settles,
    SupportsBufferLoading,
    SupportsBuffers,
    SupportsModelCheck,
    SupportsScores,
    SupportsShardLoading,
    SupportsWeightBuffers,
)
from hf_engine.backends._base import (
    Head,
    LossFunction,
    Metrics,
    RolloutBackend,
    SamplingParams,
    TrainBackend,
    TrainConfig,
)
from hf_engine.backends._registry import (
    available_rollout_backends,
    available_train_backends,
    load_rollout_backend,
    load_train_backend,
)
from hf_engine.backends._shapes import derive_shape

__all__ = [
    "AdoptsWeights",
    "ChecksLayout",
    "ChecksOptions",
    "ChecksRows",
    "DrawsItself",
    "FormsReplicas",
    "Head",
    "HoldsPadding",
    "LossFunction",
    "Metrics",
    "RolloutBackend",
    "SamplingParams",
    "Settles",
    "SupportsBufferLoading",
    "SupportsBuffers",
    "SupportsModelCheck",
    "SupportsScores",
    "SupportsShardLoading",
    "SupportsWeightBuffers",
    "TrainBackend",
    "TrainConfig",
    "available_rollout_backends",
    "available_train_backends",
    "derive_shape",
    "load_rollout_backend",
    "load_train_backend",
]
