"""megatron-core's own layers, with a norm that knows sequence parallelism, which its local specification lacks."""

from __future__ import annotations

from typing import Any

import torch

from hf_engine.training.megatron._core import TransformerBlockSubmodules, get_gpt_layer_local_spec, moe_utils
from hf_protocols.models import ModelShape

__all__ = ["RMSNorm", "build_block_spec"]


class RMSNorm(torch.nn.RMSNorm):
    """torch's norm; where ranks hold parts of the sequence, its weight's gradients are summed over them."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def build_block_spec(shape: ModelShape, num_layers: int) -> Any:
    """The specification of a stage's decoder layers.

    Args:
        shape: of the model.
        num_layers: on this stage.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        # megatron-core 0.16 reads the name in every router, and defines it where Transformer Engine is installed.
        moe_utils.te_general_gemm = None
    layer = get_gpt_layer_local_spec(
        num_experts=shape.num_experts or None, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if shape.qk_norm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
