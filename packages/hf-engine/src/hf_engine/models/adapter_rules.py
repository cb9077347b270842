"""Adapters on their way into generation: the backends that take them unmerged, and the layout that then holds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from hf_engine.backends.capabilities import SupportsUnmergedAdapters
from hf_engine.backends.lora_config import LoraConfig
from hf_engine.model_directory import ModelDirectory
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout
from hf_protocols.models import ModelShape
from hf_protocols.validation import show

__all__ = ["FLOAT32_REFUSAL", "add_adapters_apart", "find_engine_refusal", "find_merging_reason", "is_adapter_name"]

_FACTORS = ("lora_A", "lora_B")
_LARGEST_RANK = 512
"""Of adapters in vLLM 0.32 and in SGLang 0.5.23."""


def find_merging_reason(
    backend: type, model: ModelDirectory, lora: LoraConfig, options: Mapping[str, Any], *, on_cpu: bool
) -> str | None:
    """Says why a rollout backend is sent merged weights; None if it takes the adapters themselves.

    Args:
        backend: the rollout backend's class.
        model: as it was read.
        lora: of the training backend.
        options: what `build` is given in addition to model, topology and seed.
        on_cpu: True if ranks run on host processors.
    """
    if not issubclass(backend, SupportsUnmergedAdapters):
        return "this backend takes no adapters"
    return backend.find_adapter_refusal(model, lora, options, on_cpu=on_cpu)


FLOAT32_REFUSAL = "its kernels for adapters compute in bfloat16 or float16 on a device, and dtype = 'float32'"


def find_engine_refusal(model: ModelDirectory, lora: LoraConfig) -> str | None:
    """Returns the refusal that vLLM and SGLang share: they take dense families that both name as the files do."""
    family = model.config.get("model_type")
    if not ModelShape.knows(model.config):
        return f"adapters of model_type {show(family)} were not tried in this engine"
    if model.require_shape().num_experts:
        return f"{show(family)} is a mixture of experts"
    if lora.rank > _LARGEST_RANK:
        return f"rank = {lora.rank} is above {_LARGEST_RANK}, the largest of this engine"
    return None


def is_adapter_name(name: str) -> bool:
    """True for a factor of an adapter among the parameters of a layout."""
    return any(name.endswith(f".{factor}.weight") for factor in _FACTORS)


def add_adapters_apart(layout: WeightLayout, layers: Collection[str], lora: LoraConfig) -> WeightLayout:
    """A layout of the base with both factors of every adapter, whole on each rank.

    Args:
        layout: of the base.
        layers: names of the layers that have an adapter.
        lora: settings of the adapters.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        rows, columns = layout.shapes[f"{layer}.weight"]
        shapes |= {f"{layer}.lora_A.weight": (lora.rank, columns), f"{layer}.lora_B.weight": (rows, lora.rank)}
    whole = {name: (Box.whole(shape),) for name, shape in shapes.items()}
    # Ranks that share one mapping share the larger one.
    held = {id(each): {**each, **whole} for each in layout.boxes.values()}
    boxes = {rank: held[id(each)] for rank, each in layout.boxes.items()}
    return replace(layout, shapes={**layout.shapes, **shapes}, boxes=boxes)
