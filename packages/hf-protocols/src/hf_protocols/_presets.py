"""Published model sizes, as the keys of their `config.json`. Source: the models' own configurations."""

from __future__ import annotations

from typing import Any

__all__ = ["PRESETS"]


def _config(
    family: str,
    layers: int,
    hidden: int,
    width: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        **more,
    }


def _qwen3(layers: int, hidden: int, width: int, heads: int, *, tied: bool = False, **more: Any) -> dict[str, Any]:
    more = {"head_dim": 128, "tie_word_embeddings": tied, **more}
    family = "qwen3_moe" if "num_experts" in more else "qwen3"
    kv_heads = 4 if family == "qwen3_moe" else 8
    return _config(family, layers, hidden, width, heads, kv_heads, 151936, 40960, **more)


_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _config("llama", 32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": _config("llama", 40, 5120, 13824, 40, 40, 32000, 4096),
    "codellama-34b": _config("llama", 48, 8192, 22016, 64, 8, 32000, 16384),
    "llama-2-70b": _config("llama", 80, 8192, 28672, 64, 8, 32000, 4096),
    "llama-3-8b": _config("llama", 32, 4096, 14336, 32, 8, 128256, 8192),
    "llama-3-70b": _config("llama", 80, 8192, 28672, 64, 8, 128256, 8192),
    "llama-3-405b": _config("llama", 126, 16384, 53248, 128, 8, 128256, 131072),
    "mistral-7b": _config("mistral", 32, 4096, 14336, 32, 8, 32000, 32768),
    "mixtral-8x7b": _config("mixtral", 32, 4096, 14336, 32, 8, 32000, 32768, **_MIXTRAL),
    "mixtral-8x22b": _config("mixtral", 56, 6144, 16384, 48, 8, 32768, 65536, **_MIXTRAL),
    "qwen2-0.5b": _config("qwen2", 24, 896, 4864, 14, 2, 151936, 131072, tie_word_embeddings=True),
    "qwen2-1.5b": _config("qwen2", 28, 1536, 8960, 12, 2, 151936, 131072, tie_word_embeddings=True),
    "qwen2-7b": _config("qwen2", 28, 3584, 18944, 28, 4, 152064, 131072),
    "qwen2-72b": _config("qwen2", 80, 8192, 29568, 64, 8, 152064, 131072),
    "qwen2.5-0.5b": _config("qwen2", 24, 896, 4864, 14, 2, 151936, 32768, tie_word_embeddings=True),
    "qwen2.5-1.5b": _config("qwen2", 28, 1536, 8960, 12, 2, 151936, 131072, tie_word_embeddings=True),
    "qwen2.5-3b": _config("qwen2", 36, 2048, 11008, 16, 2, 151936, 32768, tie_word_embeddings=True),
    "qwen2.5-7b": _config("qwen2", 28, 3584, 18944, 28, 4, 152064, 131072),
    "qwen2.5-14b": _config("qwen2", 48, 5120, 13824, 40, 8, 152064, 131072),
    "qwen2.5-32b": _config("qwen2", 64, 5120, 27648, 40, 8, 152064, 131072),
    "qwen2.5-72b": _config("qwen2", 80, 8192, 29568, 64, 8, 152064, 131072),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    "qwen3-30b-a3b": _qwen3(48, 2048, 6144, 32, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8),
    "qwen3-235b-a22b": _qwen3(94, 4096, 12288, 64, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8),
}
