"""Tiny random models in Hugging Face format, written without the library that will load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_protocols.models import ModelShape

__all__ = ["write_tiny_model"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
}


def write_tiny_model(
    directory: str | Path,
    *,
    family: str = "llama",
    vocab_size: int = 64,
    max_positions: int = 48,
    tie_embeddings: bool = True,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Writes a model of 2 layers and hidden size 64, with weights large enough that greedy choices are clear.

    Args:
        directory: created if it is absent.
        family: `"llama"`, `"mistral"`, `"qwen2"`, `"qwen3"`, or with four experts `"mixtral"` or `"qwen3_moe"`.
        vocab_size: size of the vocabulary.
        max_positions: longest sequence.
        tie_embeddings: whether the output layer is the embedding.
        seed: of the weights.
        **config: further entries of config.json.

    Returns:
        The directory.
    """
    written = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
        **_EXPERTS.get(family, {}),
        **config,
    }
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    generator = torch.Generator().manual_seed(seed)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    weights = {
        name: torch.ones(shape, **kind) if "norm" in name else torch.randn(shape, generator=generator, **kind) * 0.2
        for name, shape in ModelShape.from_config(written).parameters().items()
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "tokenizer.json").write_text(json.dumps(_build_tokenizer(vocab_size)) + "\n")
    return target


def _build_tokenizer(vocab_size: int) -> dict[str, Any]:
    """One word for every token: 17 is "w17", and words are joined by spaces."""
    words = {f"w{number}": number for number in range(vocab_size)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
