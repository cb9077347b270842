"""Differences between families in vLLM: how it caches and builds a model, and parts that it must not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hf_engine.model_directory import ModelDirectory
from hf_engine.rollout.vllm._core import XIELU, Base, apertus, default_weight_loader, get_layerwise_info
from hf_engine.rollout.vllm._library import replaced
from hf_protocols.models import ModelShape

__all__ = ["DirectWrites", "expected_head_size", "families_as_trained"]

_DIRECT = {"GptOssForCausalLM": ("w13_weight", "w2_weight", "w13_bias", "w2_bias", "sinks")}
"""Parameters that a loader of vLLM 0.32 copies to itself, by class: a reload hears of weight loaders alone."""
_CHANGED_IN_PLACE = ("mlp.experts.down_proj_bias",)
"""Tensors of those classes in which the loader writes zeros."""


def expected_head_size(model: ModelDirectory, shape: ModelShape) -> int:
    """Size of what vLLM's attention caches of a head: with latent attention the latent and the rotated part."""
    latent, rotated = (model.text_config.get(key) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    return shape.head_dim if latent is None or rotated is None else int(latent + rotated)


@contextmanager
def families_as_trained() -> Iterator[None]:
    """Has vLLM build families as transformers does, and leaves transformers' own classes as they are.

    Of a family without a class of its own vLLM 0.32 builds transformers', and decorates the class for `torch.compile`,
    which no engine here uses: training in the same process would find it decorated. Of Apertus it keeps two parameters
    of the activation in bfloat16.
    """
    with (
        replaced(Base, "_decorate_cls_for_torch_compile", lambda *_, **__: None),
        replaced(apertus, "XIELU", lambda: XIELU(dtype=torch.get_default_dtype())),
    ):
        yield


class DirectWrites(TorchFunctionMode):
    """Sends to a parameter's weight loader what a family's loader would copy into the parameter itself.

    Args:
        model: of vLLM, before its reload is initialized.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model: Any = model
        self._names = _DIRECT.get(type(model).__name__, ())
        for layer in model.modules() if self._names else ():
            tensors, _ = get_layerwise_info(layer).restore_metadata
            for name in tensors.keys() & set(self._names):
                tensors[name].weight_loader = default_weight_loader

    def take(self, shards: Sequence[tuple[str, torch.Tensor]]) -> set[str]:
        """Lets the model load shards; returns the names of the parameters that were loaded."""
        if not self._names:
            return self._model.load_weights(iter(shards)) or set()
        given = [(name, each.clone() if name.endswith(_CHANGED_IN_PLACE) else each) for name, each in shards]
        self._parameters = {
            id(each) for name, each in self._model.named_parameters() if name.rpartition(".")[2] in self._names
        }
        with self:
            return self._model.load_weights(iter(given)) or set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answers `copy_` into such a parameter, and into its `data`."""
        if args and id(args[0]) in self._parameters:
            if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
                return args[0]
            if func == torch.Tensor.copy_:
                args[0].weight_loader(args[0], args[1])
                return args[0]
        return func(*args, **(kwargs or {}))
