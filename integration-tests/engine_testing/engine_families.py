"""Tiny random models of many families, with the sizes and keys that vLLM and SGLang need on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_engine.testing import TINY_FAMILIES, write_tiny_family

__all__ = ["write_engine_family"]

_ENGINE_SIZES = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_ENGINE_MLA = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
    "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
"""The latent sizes are DeepSeek's: vLLM has a kernel on a CPU for these, and for stretched positions."""
_ENGINE_KEYS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {**_ENGINE_MLA, "moe_layer_freq": 1, "topk_method": "greedy", "scoring_func": "softmax"},
    "deepseek_v3": {**_ENGINE_MLA, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "glm4_moe_lite": {**_ENGINE_MLA, "first_k_dense_replace": 1},
    "gemma2": {"query_pre_attn_scalar": 32, "hidden_act": "gelu_pytorch_tanh"},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "gpt_oss": {"rope_parameters": {**_YARN, "truncate": False}},
    "llama4_text": {"attention_chunk_size": 128},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
    "phi": {"intermediate_size": 256},
}
"""Keys that engines read, some of which files on the hub have and transformers does not write."""


def write_engine_family(directory: str | Path, family: str, *, seed: int = 0, **config: Any) -> Path:
    """Writes a model like `write_tiny_family`, of sizes that vLLM's kernels on a CPU have.

    Args:
        directory: created if it is absent.
        family: a name in `TINY_FAMILIES`.
        seed: of the weights.
        **config: further keys of `config.json`.
    """
    has_heads = TINY_FAMILIES[family].get("head_dim") is not ...
    heads = {"head_dim": 32} if has_heads else {}
    keys = {**_ENGINE_SIZES, **heads, **_ENGINE_KEYS.get(family, {}), **config}
    return write_tiny_family(directory, family, seed=seed, **keys)
