"""The 3D-HybridEngine: reshard the weights of a training engine into a generation engine, and back.

`hf` stands for HybridFlow. Planning (`plan_reshard`) is pure; execution (`execute_reshard`, `HybridEngine`) runs under
any torch.distributed launcher. Backends are entry points and load only when they are asked for.
"""

from __future__ import annotations

from hf_engine.backends import (
    LossFunction,
    RolloutBackend,
    SamplingParams,
    SupportsWeightBuffers,
    TrainBackend,
    TrainConfig,
    available_rollout_backends,
    available_train_backends,
    load_rollout_backend,
    load_train_backend,
)
from hf_engine.hybrid_engine import HybridEngine, Transition
from hf_engine.process_groups import build_groups
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.execute import ReshardExecutor, execute_reshard
from hf_engine.resharding.layouts import WeightLayout, fsdp_layout, replicated_layout
from hf_engine.resharding.plan import Message, ReshardPlan, plan_reshard

__all__ = [
    "Box",
    "HybridEngine",
    "LossFunction",
    "Message",
    "ReshardExecutor",
    "ReshardPlan",
    "RolloutBackend",
    "SamplingParams",
    "SupportsWeightBuffers",
    "TrainBackend",
    "TrainConfig",
    "Transition",
    "WeightLayout",
    "available_rollout_backends",
    "available_train_backends",
    "build_groups",
    "execute_reshard",
    "fsdp_layout",
    "load_rollout_backend",
    "load_train_backend",
    "plan_reshard",
    "replicated_layout",
]
