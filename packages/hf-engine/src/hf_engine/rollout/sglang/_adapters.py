"""The one adapter of an engine: what SGLang is started with for it, and how it gets there."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_engine.backends.lora_config import LoraConfig

__all__ = ["ADAPTER", "build_adapter_options", "describe_adapter", "find_partial_stack", "unwrapped"]

ADAPTER = "adapter"
"""Name by which requests ask for it."""
_STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang computes at once, and whose adapters it takes together."""


def find_partial_stack(lora: LoraConfig) -> str | None:
    """Says that the targets name a part of the layers that SGLang stacks; None if they do not."""
    named = {target.rpartition(".")[2]: target for target in lora.targets or ()}
    for stack in _STACKS:
        found = [named[layer] for layer in stack if layer in named]
        if found and (len(found) < len(stack) or any("." in target for target in found)):
            return f"targets has {', '.join(found)}, and SGLang takes {', '.join(stack)} of every layer together"
    return None


def build_adapter_options(lora: LoraConfig, layers: Collection[str]) -> dict[str, Any]:
    """Server arguments of an engine with one adapter in these layers."""
    options = {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": _ends(layers),
        "max_loras_per_batch": 2,  # the base counts as one
    }
    return options if torch.cuda.is_available() else options | {"lora_backend": "torch_native"}


def describe_adapter(lora: LoraConfig, layers: Collection[str]) -> dict[str, Any]:
    """Returns the keys of peft's `adapter_config.json` that SGLang reads."""
    return {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": _ends(layers), "peft_type": "LORA"}


@contextmanager
def unwrapped(model: Any) -> Iterator[None]:
    """Inside, layers of the base are in the place of those that compute adapters: loaders find their names."""
    from hf_engine.rollout.sglang._core import BaseLayerWithLoRA, replace_submodule

    wrapped = {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseLayerWithLoRA)}
    for name, layer in wrapped.items():
        replace_submodule(model, name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in wrapped.items():
            replace_submodule(model, name, layer)


def _ends(layers: Collection[str]) -> list[str]:
    return sorted({layer.rpartition(".")[2] for layer in layers})
