"""Translates a Hugging Face config.json for megatron-core, and refuses parts without an exact counterpart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_engine.backends.base import TrainConfig
from hf_engine.model_directory import ModelDirectory, read_end_of_sequence_ids
from hf_engine.resharding.tensor_parallel import fused_qkv_rows, split_layers
from hf_engine.training.megatron._core import TransformerConfig, quiet
from hf_engine.training.shared_prompts import MASK_BYTES, PromptSharing
from hf_protocols.errors import BackendError, ReshardError
from hf_protocols.models import ModelShape
from hf_protocols.topology import ParallelSpec
from hf_protocols.validation import show

__all__ = [
    "ARCHITECTURES",
    "MegatronModelConfig",
    "build_transformer_config",
    "check_divisible",
    "estimate_sharing",
]

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures of Hugging Face directories that megatron-core's layers express exactly."""


@dataclass(frozen=True, kw_only=True)
class MegatronModelConfig:
    """A config.json, read for megatron-core."""

    shape: ModelShape
    norm_eps: float
    window: int | None
    """Keys that a query sees, itself included, in every layer; None: all."""
    normalize_routing: bool
    """True if the weights of a token's experts sum to 1."""
    padding_id: int | None
    """Token whose embedding learns nothing from the inputs, as in transformers; None if it also ends a turn."""
    inverse_frequencies: tuple[float, ...]
    """Radians per position of every rotated pair, with any scaling applied."""

    @classmethod
    def of(cls, model: ModelDirectory) -> MegatronModelConfig:
        """Takes what megatron-core needs from a model's files.

        Raises:
            BackendError: for a model that megatron-core's layers do not express exactly.
        """
        config, directory = model.config, model.path
        _refuse_architecture(config, directory)
        shape = model.require_shape()
        _refuse_unsupported(config, shape, directory)
        return cls(
            shape=shape,
            norm_eps=config.get("rms_norm_eps", 1e-5 if shape.family == "mixtral" else 1e-6),
            window=_window(config, directory),
            normalize_routing=shape.family == "mixtral" or bool(config.get("norm_topk_prob", False)),
            padding_id=_padding_id(model, shape.vocab_size),
            inverse_frequencies=tuple(_inverse_frequencies(config, shape, directory).tolist()),
        )


def build_transformer_config(
    model: MegatronModelConfig, train: ParallelSpec, config: TrainConfig, dtype: torch.dtype
) -> Any:
    """megatron-core's configuration: no dropout, no fused kernels that need a GPU library, summed gradients.

    Raises:
        BackendError: for sizes that do not divide.
    """
    shape = model.shape
    check_divisible(shape, train)
    stages: list[list[str]] = [["decoder"] * len(layers) for layers in split_layers(shape.num_layers, train.pp_size)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    recompute: dict[str, Any] = {}
    if config.activation_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    with quiet():
        return TransformerConfig(**_options(model, train, dtype, stages), **recompute)


def _options(
    model: MegatronModelConfig, train: ParallelSpec, dtype: torch.dtype, stages: list[list[str]]
) -> dict[str, Any]:
    shape = model.shape
    return dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        init_method=_leave,
        output_layer_init_method=_leave,
        tensor_model_parallel_size=train.tp_size,
        pipeline_model_parallel_size=train.pp_size,
        pipeline_model_parallel_layout=stages if train.pp_size > 1 else None,
        sequence_parallel=train.tp_size > 1,
        variable_seq_lengths=train.pp_size > 1,
        moe_token_dispatcher_type="alltoall",  # the one for sequences of any length
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=False,
        # Gradients are summed over ranks and micro-batches; the loss carries the global denominator.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_moe_options(model, train),
    )


def _leave(tensor: torch.Tensor) -> torch.Tensor:
    """Weights are read from files before they are used."""
    return tensor


def _moe_options(model: MegatronModelConfig, train: ParallelSpec) -> dict[str, Any]:
    if not model.shape.num_experts:
        return {}
    return {
        "num_moe_experts": model.shape.num_experts,
        "moe_ffn_hidden_size": model.shape.intermediate_size,
        "moe_router_topk": model.shape.num_experts_per_token,
        "moe_router_pre_softmax": not model.normalize_routing,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "expert_model_parallel_size": train.ep_size,
        "expert_tensor_parallel_size": train.tp_size,
    }


def estimate_sharing(shape: ModelShape, train: ParallelSpec, config: TrainConfig) -> PromptSharing | None:
    """Costs by which rows are packed, alike on every rank; None where the configuration packs none.

    A rank has a mask for all of its layers, of which the smallest stage has the fewest, and its part of each token.
    """
    if config.shared_prompts is False:
        return None
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    experts = max(1, shape.num_experts_per_token)
    a_layer = shape.hidden_size * (2 * query + 2 * key + 3 * shape.intermediate_size * experts + shape.num_experts)
    layers = max(1, shape.num_layers // train.pp_size)
    return PromptSharing.estimate(
        attended=shape.num_layers * query,
        passed=shape.num_layers * a_layer,
        pair_bytes=MASK_BYTES,
        token_bytes=max(1, 4 * layers * shape.hidden_size // train.tp_size),
        always=config.shared_prompts is True,
    )


def check_divisible(shape: ModelShape, train: ParallelSpec) -> None:
    """Refuses a layout whose sizes do not divide the model's.

    Raises:
        BackendError: naming both sizes.
    """
    if train.ep_size > 1 and not shape.num_experts:
        raise BackendError(
            f"ep_size={train.ep_size} spreads experts over ranks, and {shape.name} has no experts. Set ep_size=1"
        )
    try:
        fused_qkv_rows(shape, 0, train.tp_size)
    except ReshardError as error:
        raise BackendError(str(error)) from error
    sizes = (
        ("intermediate_size", shape.intermediate_size, "tp_size", train.tp_size),
        ("num_experts", shape.num_experts, "ep_size", train.ep_size),
    )
    for what, size, axis, ranks in sizes:
        if size % ranks:
            raise BackendError(f"{axis}={ranks} does not divide {what}={size} of {shape.name}. Choose a divisor")


def _refuse_architecture(config: Mapping[str, Any], directory: str | Path) -> None:
    architectures = config.get("architectures") or ["none"]
    if architectures[0] not in ARCHITECTURES:
        raise BackendError(
            f"the megatron backend does not know the architecture {architectures[0]} of {directory}; it knows "
            f"{', '.join(ARCHITECTURES)}. The fsdp backend runs every model of transformers"
        )


def _refuse_unsupported(config: Mapping[str, Any], shape: ModelShape, directory: str | Path) -> None:
    problems = []
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act={show(config['hidden_act'])} (silu)")
    if shape.o_bias or shape.mlp_bias:
        problems.append("biases in the output projection or the MLP")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor={config['partial_rotary_factor']} (1)")
    if problems:
        raise BackendError(f"the megatron backend cannot express {directory} exactly: {'; '.join(problems)}")


def _padding_id(model: ModelDirectory, vocab_size: int) -> int | None:
    stated = model.config.get("pad_token_id")
    padding_id = None if stated is None else int(stated) % vocab_size
    return None if padding_id in read_end_of_sequence_ids(model) else padding_id


def _window(config: Mapping[str, Any], directory: str | Path) -> int | None:
    """The sliding window of all layers; families that switch it by layer must have it off."""
    family = config.get("model_type", "llama")
    window: int | None = config.get("sliding_window", 4096 if family == "mistral" else None)
    if family in ("mistral", "mixtral"):
        return window
    if window is not None and config.get("use_sliding_window", False):
        raise BackendError(
            f"{directory} has a sliding window in some layers only, which the megatron backend does not support. Use "
            "the fsdp backend"
        )
    return None


def _inverse_frequencies(config: Mapping[str, Any], shape: ModelShape, directory: str | Path) -> torch.Tensor:
    """Rotary frequencies as transformers computes them for the types default, linear and llama3."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    defaults = {"mixtral": 1e6}
    theta = float(rope.get("rope_theta", config.get("rope_theta", defaults.get(shape.family, 10000.0))))
    dims = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    frequencies: torch.Tensor = 1.0 / theta**dims
    if kind == "default":
        return frequencies
    if kind not in ("linear", "llama3"):
        raise BackendError(
            f"{directory} has rope_type={show(kind)}; the megatron backend has default, linear and llama3"
        )
    try:
        return _scaled(frequencies, kind, rope)
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError(f"{directory} has rope_type={show(kind)} and cannot be read: {error!r} in {rope}") from error


def _scaled(frequencies: torch.Tensor, kind: str, rope: Mapping[str, Any]) -> torch.Tensor:
    if kind == "linear":
        return frequencies / float(rope["factor"])
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    scaled: torch.Tensor = (1 - keep) * frequencies / rope["factor"] + keep * frequencies
    return scaled
