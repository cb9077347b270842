"""Workload of the generation benchmarks: a model, and prompts of ragged lengths."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["MAX_NEW_TOKENS", "WORKLOADS", "draw_prompts", "write_model"]

MAX_NEW_TOKENS = 32
WORKLOADS = {"shared_prompts": (16, 8, 64), "one_sample": (128, 1, 16)}
"""Prompts, samples of each, and tokens of the longest prompt; the shortest has half as many."""
_VOCAB_SIZE = 256


def draw_prompts(num_prompts: int, longest: int, seed: int) -> list[torch.Tensor]:
    """Token ids of every prompt."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest // 2, longest + 1, (num_prompts,), generator=generator)
    return [torch.randint(2, _VOCAB_SIZE, (int(length),), generator=generator) for length in lengths]


def write_model(directory: str | Path) -> None:
    """Random weights with an end-of-sequence token that they draw now and then."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Untrained logits are all alike: this ends about one response in twenty at every token.
        model.lm_head.weight[1] *= 6.0
    model.save_pretrained(directory)
