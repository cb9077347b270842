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
from hf_engine.backends._responses import build_responses, read_prompts
from hf_engine.backends._sampling import draw_uniforms, sample_tokens
from hf_engine.backends._shapes import derive_shape
from hf_engine.backends._stop_strings import StopStrings, load_stop_strings

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
    "StopStrings",
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
    "build_responses",
    "derive_shape",
    "draw_uniforms",
    "load_rollout_backend",
    "load_stop_strings",
    "load_train_backend",
    "read_prompts",
    "sample_tokens",
]
