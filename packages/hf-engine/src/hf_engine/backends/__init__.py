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
    Settles,
    SupportsAdapters,
    SupportsBufferLoading,
    SupportsBuffers,
    SupportsModelCheck,
    SupportsScores,
    SupportsShardLoading,
    SupportsWeightBuffers,
    TakesAdapters,
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
from hf_engine.backends._lora_config import LoraConfig
from hf_engine.backends._merging import merge_adapter
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
    "Settles",
    "StopStrings",
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
    "build_responses",
    "derive_shape",
    "draw_uniforms",
    "load_rollout_backend",
    "load_stop_strings",
    "load_train_backend",
    "merge_adapter",
    "read_prompts",
    "sample_tokens",
]
