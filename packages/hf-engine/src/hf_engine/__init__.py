"""The 3D-HybridEngine: reshard the weights of a training engine into a generation engine, and back.

Planning (`plan_reshard`) is pure; execution (`execute_reshard`, `HybridEngine`) runs under
any torch.distributed launcher. Backends are entry points and load only when they are asked for.
What must not live here: Ray, roles and algorithms.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_engine.backends import (
    LoraConfig,
    LossFunction,
    RolloutBackend,
    SamplingParams,
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
    TrainBackend,
    TrainConfig,
    available_rollout_backends,
    available_train_backends,
    load_rollout_backend,
    load_train_backend,
)
from hf_engine.hybrid_engine.hybrid_engine import HybridEngine
from hf_engine.hybrid_engine.logprob_check import (
    LOGPROB_BOUNDS,
    LogprobGap,
    check_logprobs,
    find_coarsest,
    measure_logprob_gap,
)
from hf_engine.hybrid_engine.transitions import Transition, TransitionMemory
from hf_engine.hybrid_engine.weight_sync import WeightSync
from hf_engine.models.adapter_rules import find_merging_reason
from hf_engine.models.merging import merge_adapter
from hf_engine.models.shapes import derive_shape
from hf_engine.process_groups import build_groups, default_group
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.checking import ConversionReport, check_conversion
from hf_engine.resharding.execute import ReshardExecutor, Transfer, execute_reshard
from hf_engine.resharding.layouts import WeightLayout, fsdp_layout, replicated_layout
from hf_engine.resharding.model_layouts import generation_layout, megatron_layout
from hf_engine.resharding.plan import Message, ReshardPlan, plan_reshard
from hf_engine.resharding.transition import Exchange, TransitionPlan, plan_transition
from hf_engine.training.state import LoadedState, StateFile, list_written

if TYPE_CHECKING:
    from hf_engine.rollout.responses import build_responses, read_prompts
    from hf_engine.rollout.sampling import draw_uniforms, sample_tokens
    from hf_engine.rollout.stop_strings import StopStrings, load_stop_strings

__all__ = [
    "LOGPROB_BOUNDS",
    "Box",
    "ConversionReport",
    "Exchange",
    "HybridEngine",
    "LoadedState",
    "LogprobGap",
    "LoraConfig",
    "LossFunction",
    "Message",
    "ReshardExecutor",
    "ReshardPlan",
    "RolloutBackend",
    "SamplingParams",
    "StateFile",
    "StopStrings",
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
    "Transfer",
    "Transition",
    "TransitionMemory",
    "TransitionPlan",
    "WeightLayout",
    "WeightSync",
    "available_rollout_backends",
    "available_train_backends",
    "build_groups",
    "build_responses",
    "check_conversion",
    "check_logprobs",
    "default_group",
    "derive_shape",
    "draw_uniforms",
    "execute_reshard",
    "find_coarsest",
    "find_merging_reason",
    "fsdp_layout",
    "generation_layout",
    "list_written",
    "load_rollout_backend",
    "load_stop_strings",
    "load_train_backend",
    "measure_logprob_gap",
    "megatron_layout",
    "merge_adapter",
    "plan_reshard",
    "plan_transition",
    "read_prompts",
    "replicated_layout",
    "sample_tokens",
]

_HOMES = {
    "StopStrings": "stop_strings",
    "build_responses": "responses",
    "draw_uniforms": "sampling",
    "load_stop_strings": "stop_strings",
    "read_prompts": "responses",
    "sample_tokens": "sampling",
}
"""Parts of a rollout backend, and the modules of `rollout` that load tensordict for them."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.rollout.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
