"""Weights that arrive as shards: vLLM's own loaders place them, and see whole parameters of which they take a part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_engine.rollout.vllm._adapters import unwrap_layers, wrap_layers
from hf_engine.rollout.vllm._core import (
    SKIP_LOAD_TENSORS,
    ParallelLMHead,
    UnquantizedFusedMoEMethod,
    VocabParallelEmbedding,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    current_platform,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    is_deferred_attention_layer,
)
from hf_engine.rollout.vllm._families import DirectWrites
from hf_protocols.errors import ReshardError

__all__ = ["TRANSFER", "ShardTransferEngine", "register_transfer"]

TRANSFER = "hf_engine"
"""Name of the weight transfer engine in vLLM's registry."""


@dataclass
class _NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    pass


@dataclass
class _Shards(WeightTransferUpdateInfo):  # type: ignore[misc]
    shards: Sequence[tuple[str, torch.Tensor]]


class ShardTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads shards through vLLM's layerwise reload: a layer is packed as soon as all of it is there."""

    init_info_cls = _NoInit
    update_info_cls = _Shards

    def init_transfer_engine(self, init_info: _NoInit) -> None:
        """Nothing to connect: shards come from this process."""

    @torch.no_grad()
    def start_weight_update(self) -> None:
        """Prepares every layer; what an update that never finished left behind is dropped."""
        unwrap_layers(self.model)
        self._drop_unfinished()
        self._name_loaders()
        self._writes = DirectWrites(self.model)
        initialize_layerwise_reload(self.model)
        self._forget_kernels()
        self._loaded: set[str] = set()

    @torch.no_grad()
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes the shards of some parameters; they are kept until the layer that they are in is complete."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _Shards) -> None:
        """As `update_weights`."""
        self._loaded |= self._writes.take(update_info.shards)

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Packs what is left.

        Raises:
            ReshardError: if vLLM has parameters that no shard reached.
        """
        unreached = [module for module in self.model.modules() if _is_unreached(module)]
        finalize_layerwise_reload(self.model, self.model_config)
        self._pack_tied()
        # Latent attention derives its own from a layer that was loaded.
        derived = _own_parameters(module for module in self.model.modules() if is_deferred_attention_layer(module))
        old = _own_parameters(unreached) - _own_parameters({*self.model.modules()}.difference(unreached))
        found = [(name, id(each)) for name, each in self.model.named_parameters() if id(each) not in derived]
        if missing := sorted(name for name, each in found if name not in self._loaded or each in old):
            raise ReshardError(
                f"vLLM's parameters {missing} were not loaded: their names do not map to the model's, or vLLM's loader "
                "of this family does not load them in an update"
            )
        wrap_layers(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""

    def _name_loaders(self) -> None:
        """Names the loaders that are partial functions: vLLM reads the names of all in a reload."""
        for parameter in self.model.parameters():
            loader = getattr(parameter, "weight_loader", None)
            if isinstance(loader, partial):
                loader.__dict__.setdefault("__name__", loader.func.__name__)

    def _forget_kernels(self) -> None:
        """On a CPU vLLM packs experts only where it also makes their kernel: it then leaves a reload unpacked."""
        for module in self.model.modules() if current_platform.is_cpu() else ():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                method.moe_kernel = None

    def _pack_tied(self) -> None:
        """Packs output layers whose weight is the embedding's: vLLM's reload packs only the module that it loads."""
        owners = {id(module.weight) for module in self.model.modules() if type(module) is VocabParallelEmbedding}
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and id(module.weight) in owners:
                module.quant_method.process_weights_after_loading(module)

    def _drop_unfinished(self) -> None:
        unfinished = [info for info in self._infos() if info.can_load()]
        for info in unfinished:
            info.loaded_weights.clear()
            info.load_numel = 0
        if unfinished:
            finalize_layerwise_reload(self.model, self.model_config)

    def _infos(self) -> Iterator[Any]:
        return (get_layerwise_info(layer) for layer in self.model.modules())


def _is_unreached(module: torch.nn.Module) -> bool:
    """True where a loader wrote to a parameter past the reload, which then brings the old values back."""
    if isinstance(module, VocabParallelEmbedding) and not module.shard_indices.num_org_elements:
        return False  # of a small vocabulary a rank may have padding alone
    info = get_layerwise_info(module)
    return info.can_load() and not is_deferred_attention_layer(module) and info.load_numel <= 0


def _own_parameters(modules: Iterable[torch.nn.Module]) -> set[int]:
    """Those that go through the reload: routing biases are written in place."""
    named = (each for module in modules for each in module.named_parameters(recurse=False))
    return {id(parameter) for name, parameter in named if name not in SKIP_LOAD_TENSORS}


def register_transfer() -> None:
    """Makes the engine known to vLLM."""
    if TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER, ShardTransferEngine)
