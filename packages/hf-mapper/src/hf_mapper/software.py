"""Facts about the design of a training stack; its speed is fitted (`EfficiencySpec`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hf_mapper._names import unknown_name
from hf_protocols import ConfigError, ModelShape
from hf_protocols.validation import Checks

__all__ = ["FSDP", "LLM_FOUNDRY", "MEGATRON_2021", "MEGATRON_DEEPSPEED", "ZERO_2021", "EngineSpec", "SoftwareSpec"]

_check = Checks(ConfigError)

_GATHERED = ("matrix", "layer", "model")


@dataclass(frozen=True, kw_only=True)
class SoftwareSpec:
    """A training stack; the defaults describe the backends of hf-engine.

    `fused_attention`: scores stay on chip, and a causal mask halves the work; otherwise they are written and read, as
    they are for a model that `keeps_scores`.
    `sequence_parallel`: norms and residuals are sharded over the tensor group too (Korthikanti et al.).
    `distributed_optimizer`: Megatron's optimizer state is sharded over data-parallel ranks.
    `dropout`: masks are drawn in training, which takes memory.
    `cast_weights`: weights are held once, in fp32, and cast when they are gathered; else there is a 16-bit copy too.
    `fused_loss`: the cross entropy holds logits and their gradient in the model's dtype, and widens them in parts.
    `shared_rails`: gathered weights enter a machine once and spread over its own links; otherwise every rank
    receives all of them over its part of the network.
    `gathers`: the unit that FSDP holds whole: the current and the next `"layer"` or `"matrix"`, or the `"model"`.
    `gradient_bytes`: of one parameter's gradient, as it is kept and summed.

    Raises:
        ConfigError: for an unknown value of `gathers`, or fewer `gradient_bytes` than 1.
    """

    name: str = "hf-engine"
    fused_attention: bool = True
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    dropout: bool = False
    cast_weights: bool = False
    fused_loss: bool = True
    shared_rails: bool = True
    gathers: Literal["matrix", "layer", "model"] = "layer"
    gradient_bytes: int = 4

    def __post_init__(self) -> None:
        if self.gathers not in _GATHERED:
            raise unknown_name("software: gathers", str(self.gathers), _GATHERED)
        _check.count("software: gradient_bytes", self.gradient_bytes)

    def fuses_attention(self, model: ModelShape) -> bool:
        """True if passes of training and of scoring keep the scores of this model's attention on chip."""
        return self.fused_attention and not model.keeps_scores


FSDP = SoftwareSpec(name="fsdp", cast_weights=True, fused_loss=False)
"""PyTorch's FSDP with mixed precision, as torchtitan has it."""

LLM_FOUNDRY = SoftwareSpec(name="llm-foundry", cast_weights=True)
"""llm-foundry with Composer's FSDP."""

MEGATRON_2021 = SoftwareSpec(
    name="megatron-2021",
    fused_attention=False,
    sequence_parallel=False,
    distributed_optimizer=False,
    dropout=True,
    fused_loss=False,
)
"""Megatron-LM of the SC'21 paper: no fused attention, nothing sharded."""

MEGATRON_DEEPSPEED = replace(MEGATRON_2021, name="megatron-deepspeed", gradient_bytes=2)
"""Megatron's model with DeepSpeed's engine, without ZeRO: gradients are kept and summed in the model's 16 bits."""

ZERO_2021 = SoftwareSpec(
    name="zero-2021",
    fused_attention=False,
    sequence_parallel=False,
    dropout=True,
    fused_loss=False,
    shared_rails=False,
    gathers="matrix",
    gradient_bytes=2,
)
"""DeepSpeed's ZeRO-3 as the SC'21 paper measured it: 2 + 2 + 12 bytes a parameter (Rajbhandari et al.)."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """A generation engine; the defaults describe current engines.

    `memory_fraction` of a device holds the runtime's reserve, the weights and the cache.
    `one_shot_reduce`: small all-reduces inside a machine read every peer at once rather than go around a ring.
    `first_token_decodes`: the first token comes from a decode step after the prefill rather than from the prefill.
    `evicts`: sequences start while the cache has room, and are evicted when it is full; otherwise each starts
    when there is room for all of it, as by TensorRT-LLM's default policy, GUARANTEED_NO_EVICT.
    """

    name: str = "vllm"
    memory_fraction: float = 0.9
    one_shot_reduce: bool = True
    first_token_decodes: bool = False
    evicts: bool = True
