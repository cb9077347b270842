"""The contract of training and rollout backends: their Protocols, the values that cross them, and the registry.

What lives here: `base` and `capabilities`, configurations, columns as tensors, checks of `build`, and versions.
What must not: a backend, which is in `training` or `rollout`, and anything that imports a backend's library.
"""

from __future__ import annotations

from hf_engine.backends.base import (
    Head,
    LossFunction,
    Metrics,
    RolloutBackend,
    SamplingParams,
    TrainBackend,
    TrainConfig,
)
from hf_engine.backends.capabilities import (
    SupportsAdapterCheck,
    SupportsAdapters,
    SupportsAdapterUpdates,
    SupportsBufferLoading,
    SupportsBuffers,
    SupportsEngineSampling,
    SupportsLayoutCheck,
    SupportsModelCheck,
    SupportsOptionCheck,
    SupportsPadding,
    SupportsPromptCheck,
    SupportsReplicas,
    SupportsRowCheck,
    SupportsScores,
    SupportsShardLoading,
    SupportsUnmergedAdapters,
    SupportsWeightAdoption,
    SupportsWeightBuffers,
)
from hf_engine.backends.lora_config import LoraConfig
from hf_engine.backends.registry import (
    available_rollout_backends,
    available_train_backends,
    load_rollout_backend,
    load_train_backend,
)

__all__ = [
    "Head",
    "LoraConfig",
    "LossFunction",
    "Metrics",
    "RolloutBackend",
    "SamplingParams",
    "SupportsAdapterCheck",
    "SupportsAdapterUpdates",
    "SupportsAdapters",
    "SupportsBufferLoading",
    "SupportsBuffers",
    "SupportsEngineSampling",
    "SupportsLayoutCheck",
    "SupportsModelCheck",
    "SupportsOptionCheck",
    "SupportsPadding",
    "SupportsPromptCheck",
    "SupportsReplicas",
    "SupportsRowCheck",
    "SupportsScores",
    "SupportsShardLoading",
    "SupportsUnmergedAdapters",
    "SupportsWeightAdoption",
    "SupportsWeightBuffers",
    "TrainBackend",
    "TrainConfig",
    "available_rollout_backends",
    "available_train_backends",
    "load_rollout_backend",
    "load_train_backend",
]
