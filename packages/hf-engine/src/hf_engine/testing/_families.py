"""Tiny random models of many families, as transformers builds and writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["FURTHER_FAMILIES", "TINY_FAMILIES", "write_tiny_family"]

_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_DEEPSEEK = {**_MLA, **_EXPERTS, **_GROUPS, "n_routed_experts": 4, "num_key_value_heads": 4, "head_dim": ...}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 48,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

TINY_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS, "norm_topk_prob": True},
    "gemma": {},
    "gemma2": {**_MIXED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.5},
    "gemma3_text": {**_MIXED, "query_pre_attn_scalar": 8},
    "phi": {"head_dim": ...},
    "phi3": {"head_dim": ...},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": ...},
    "olmo2": {"head_dim": ...},
    "olmo3": {**_MIXED, "head_dim": ...},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": ...},
    "glm4": {},
    "glm4_moe": {"n_routed_experts": 4, **_EXPERTS, **_GROUPS},
    "gpt_oss": {**_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "exaone_moe": {"num_experts": 4, **_EXPERTS, "n_group": 1, "topk_group": 1},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": ...},
    "qwen2_moe": {"num_experts": 4, **_EXPERTS, "shared_expert_intermediate_size": 32, "head_dim": ...},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 16,
    },
    "granite": {"head_dim": ..., "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "falcon": {"head_dim": ..., "intermediate_size": ..., "num_key_value_heads": ..., "max_position_embeddings": ...},
    "starcoder2": {"head_dim": ...},
    "cohere": {"head_dim": ..., "logit_scale": 0.5},
    "cohere2": {**_MIXED, "logit_scale": 0.5},
    "smollm3": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "head_dim": ...},
    "exaone4": {**_MIXED},
    "apertus": {},
    "stablelm": {"head_dim": ...},
    "gpt2": {"n_inner": 48},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {},
}
"""Keys of `config.json` by model type; `...` leaves a size of all the others out. Phi-4 and others share a model
type with one of these."""

_SPARSE = {"mlp_layer_types": ["dense", "sparse"], **_EXPERTS}
_INDEXED = {"index_topk": 3, "index_head_dim": 16, "index_n_heads": 16, "layer_types": ["indexed_attention"] * 2}
_LATENT = {**_MLA, "num_key_value_heads": 4, "head_dim": ...}
_GEMMA = {**_MIXED, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}

FURTHER_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {**_MIXED, **_EXPERTS, "num_experts": 4, "num_shared_experts": 1},
    "arcee": {},
    "cohere2_moe": {**_MIXED, "num_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["sparse", "sparse"]},
    "cwm": {**_MIXED, "bos_token_id": 1},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 48,
        "hidden_size": ...,
        "num_attention_heads": ...,
        "num_hidden_layers": ...,
        "max_position_embeddings": ...,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "num_key_value_heads": ...,
    },
    "deepseek_v32": {**_LATENT, **_SPARSE, **_INDEXED, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "dots1": {**_EXPERTS, **_GROUPS, "n_routed_experts": 4, "n_shared_experts": 1},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": ...},
    "gemma3n_text": {
        **_GEMMA,
        "intermediate_size": [48, 48],
        "activation_sparsity_pattern": [0.0, 0.0],
        "altup_num_inputs": 2,
        "laurel_rank": 8,
    },
    "gemma4_text": {**_GEMMA, "pad_token_id": 0, "per_layer_config": {"1": {"head_dim": 16}}},
    "glm": {},
    "glm_moe_dsa": {**_LATENT, **_SPARSE, **_INDEXED, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4, "n_inner": 48},
    "granitemoehybrid": {
        "layer_types": ["full_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "head_dim": ...,
    },
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "head_dim": ...,
    },
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": {**_SPARSE, "num_experts": 4, "num_shared_experts": 1},
    "jais2": {},
    "jetmoe": {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": ...},
    "laguna": {
        **_MIXED,
        **_SPARSE,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "num_attention_heads_per_layer": [4, 8],
    },
    "longcat_flash": {
        **_LATENT,
        "head_dim": 8,
        "num_layers": 2,
        "num_hidden_layers": ...,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
    },
    "mimo_v2_flash": {**_MIXED, **_SPARSE, "n_routed_experts": 4, "v_head_dim": 8, "n_group": 1, "topk_group": 1},
    "minicpm3": {**_LATENT, "dim_model_base": 32},
    "ministral": {**_MIXED},
    "ministral3": {"max_position_embeddings": 64},
    "mpt": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "persimmon": {},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "solar_open": {"n_routed_experts": 4, "n_shared_experts": 1, **_EXPERTS, "n_group": 1, "topk_group": 1},
    "vaultgemma": {**_MIXED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.5},
    "xglm": {"ffn_dim": 48},
    "youtu": {**_LATENT},
}
"""Families that are tested in `fsdp` with `transformers` alone, in the same form."""


def write_tiny_family(directory: str | Path, family: str, *, seed: int = 0, **config: Any) -> Path:
    """Writes a random model of two layers in Hugging Face format, every tensor of it different from its default.

    Args:
        directory: created if it is absent.
        family: a name in `TINY_FAMILIES` or `FURTHER_FAMILIES`.
        seed: of the weights.
        **config: further keys of `config.json`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    own = (TINY_FAMILIES if family in TINY_FAMILIES else FURTHER_FAMILIES)[family]
    known = AutoConfig.for_model(family)
    stated = known.to_dict()  # of some configurations a key that layers have apart cannot be read
    asked = {key: value for key, value in {**_SIZES, **own, **config}.items() if value is not ...}
    keys = {
        key: value
        for key, value in asked.items()
        if key in own or key in config or key in stated or hasattr(known, key)
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        described = AutoConfig.for_model(family, **keys)
        build: Any = AutoModelForCausalLM.from_config
        model = build(described, dtype=torch.float32, trust_remote_code=False)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point() and tensor.dim() < 2:  # norms, biases and buffers, which begin as 0 or 1
                    tensor.add_(torch.rand_like(tensor) * 0.2)
    model.save_pretrained(directory)
    return Path(directory)
