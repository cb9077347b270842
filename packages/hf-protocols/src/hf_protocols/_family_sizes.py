"""Sizes of a model of any family, under the names that configurations have for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_protocols.errors import ConfigError

__all__ = ["read_family_sizes"]

_NAMES: Mapping[str, Sequence[str]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "width": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"),
    "expert_width": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "chosen_experts": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_width": ("shared_expert_intermediate_size", "shared_intermediate_size"),
}
_PARTS_OF_HEADS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Of attention with latent keys and values: the cache holds keys of the first two sizes, values of the third."""


def read_family_sizes(config: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Returns sizes of attention and MLP, by the names that `ModelShape` has for them.

    Experts count as one dense layer, as wide as those that a token visits. Keys and values of different sizes
    count with their mean.

    Args:
        config: keys of a `config.json`, with the defaults of its family.
        hidden_size: columns of the embedding.

    Raises:
        ConfigError: for a configuration without a number of layers.
    """
    layers, heads = _find(config, "num_layers"), _find(config, "num_heads") or 1
    if layers is None:
        raise ConfigError(f"the model's config.json has none of {', '.join(_NAMES['num_layers'])}")
    kv_heads = 1 if config.get("multi_query") is True else _find(config, "num_kv_heads") or heads
    head_dim = _whole(config.get("head_dim")) or max(1, hidden_size // heads)
    parts = [_whole(config.get(name)) for name in _PARTS_OF_HEADS]
    if all(parts):
        kv_heads, head_dim = heads, -(-sum(part or 0 for part in parts) // 2)
    return {
        "num_layers": layers,
        "intermediate_size": _active_width(config) or 4 * hidden_size,
        "num_heads": heads,
        "num_kv_heads": kv_heads if heads % kv_heads == 0 else heads,
        "head_dim": head_dim,
    }


def _active_width(config: Mapping[str, Any]) -> int | None:
    width, chosen = _find(config, "width"), _find(config, "chosen_experts")
    if chosen is None:
        return width
    each = _find(config, "expert_width") or width or 0
    shared = _find(config, "shared_width") or each * (_find(config, "shared_experts") or 0)
    return chosen * each + shared or None


def _find(config: Mapping[str, Any], size: str) -> int | None:
    return next((found for name in _NAMES[size] if (found := _whole(config.get(name))) is not None), None)


def _whole(value: object) -> int | None:
    """The value as a size; None for what is not one."""
    return value if type(value) is int and value > 0 else None
