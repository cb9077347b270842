"""The one adapter of an engine: vLLM's own layers compute it next to the base, which is loaded without them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, get_args

import torch

from hf_engine.backends.lora_config import LoraConfig
from hf_engine.rollout.vllm._core import LoRAModel, LoRARequest, MaxLoRARanks, PEFTHelper, replace_submodule

__all__ = ["EngineAdapter", "build_adapter_arguments", "unwrap_layers", "wrap_layers"]

_ID = 1
_REQUEST = LoRARequest(lora_name="adapter", lora_int_id=_ID, lora_path="held in memory")


def build_adapter_arguments(lora: LoraConfig, layers: Collection[str]) -> dict[str, Any]:
    """Arguments of vLLM's engine for one adapter in these layers."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank),
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
    }


class EngineAdapter:
    """The adapter that a worker computes with.

    Args:
        worker: vLLM's, of an engine with the arguments of `build_adapter_arguments`.
        lora: settings of the adapter.
        layers: names of the layers that have one.
    """

    def __init__(self, worker: Any, lora: LoraConfig, layers: Collection[str]) -> None:
        self._runner = worker.model_runner
        self._device = worker.device
        self._lora = lora
        self._layers = layers
        self._is_set = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers that vLLM's layers compute with."""
        modules = self._manager.modules.values()
        return sum(each.nbytes for module in modules for each in (*module.lora_a_stacked, *module.lora_b_stacked))

    @property
    def request(self) -> LoRARequest | None:
        """Adapter that a request names to be computed with it; None before the first adapter was put."""
        return _REQUEST if self._is_set else None

    def put(self, factors: Mapping[str, torch.Tensor]) -> None:
        """Replaces the adapter.

        Args:
            factors: whole, by the names in a layout; they are handed over.
        """
        helper = PEFTHelper(r=self._lora.rank, lora_alpha=self._lora.alpha, target_modules=list(self._layers))
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            _ID,
            {f"base_model.model.{name}": tensor for name, tensor in factors.items()},
            helper,
            device=str(self._device),
            dtype=self._runner.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        self._manager.remove_adapter(_ID)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(_ID)
        self._is_set = True

    @property
    def _manager(self) -> Any:
        return self._runner.lora_manager._adapter_manager


def unwrap_layers(model: Any) -> None:
    """Puts the layers of the base in the place of those that compute adapters, so that loaders find their names."""
    for name, layer in _wrapped(model).items():
        replace_submodule(model, name, layer.base_layer)


def wrap_layers(model: Any) -> None:
    """Undoes `unwrap_layers`."""
    for name, layer in _wrapped(model).items():
        replace_submodule(model, name, layer)


def _wrapped(model: Any) -> Mapping[str, Any]:
    manager = getattr(model, "lora_manager", None)
    return {} if manager is None else manager.modules
