"""megatron-core's own layers, with a norm that knows sequence parallelism, and torch's function of attention.

megatron-core's local attention keeps the scores of all pairs of tokens, and computes what the mask hides.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_engine.training.megatron._core import TransformerBlockSubmodules, get_gpt_layer_local_spec, moe_utils
from hf_protocols.models import ModelShape

__all__ = ["RMSNorm", "TorchAttention", "build_block_spec"]


class RMSNorm(torch.nn.RMSNorm):
    """torch's norm; where ranks hold parts of the sequence, its weight's gradients are summed over them."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class TorchAttention(torch.nn.Module):
    """torch's scaled_dot_product_attention as megatron-core's core attention."""

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        """Returns [S, b, heads * d] from queries [S, b, heads, d], and keys and values [S, b, groups, d].

        Args:
            query: of this rank's heads.
            key: of this rank's groups of heads.
            value: likewise.
            attention_mask: [b or 1, 1, S, S] in the dtype of the queries, 0 where a query sees a key and -inf
                elsewhere; None: it sees none after it.
        """
        shared = query.shape[2] // key.shape[2]
        # In other cases on a GPU torch has a kernel for groups of heads only that holds all scores.
        takes_groups = query.is_cpu or (attention_mask is None and query.dtype != torch.float32)
        if shared > 1 and not takes_groups:
            key, value = (each.repeat_interleave(shared, dim=2) for each in (key, value))
        queries, keys, values = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attention_mask,
            is_causal=attention_mask is None,
            scale=self._scale,
            enable_gqa=takes_groups,
        )
        return context.permute(2, 0, 1, 3).flatten(2)


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
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = TorchAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
