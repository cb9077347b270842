"""Weights that arrive as shards: vLLM's own loaders place them, and see whole parameters of which they take a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from hf_engine.resharding.boxes import Box
from hf_protocols.errors import ReshardError

__all__ = ["TRANSFER", "Shard", "ShardTransferEngine", "register_transfer"]

TRANSFER = "hf_engine"
"""Name of the weight transfer engine in vLLM's registry."""


class Shard(torch.Tensor):
    """A box of a parameter in the shape of the whole: what a loader cuts out of it must be exactly the box.

    vLLM's loaders take whole parameters and narrow them to their rank's part. Given this, they find the part already
    cut, and a loader that wants any other part is refused: the layouts of both sides cannot differ unnoticed.
    """

    _name: str
    _whole: Box
    _box: Box
    _part: torch.Tensor

    @staticmethod
    def __new__(cls: type[Shard], name: str, shape: Sequence[int], box: Box, part: torch.Tensor) -> Shard:
        """A whole parameter `name` of `shape`, of which `part` is at `box`."""
        shard: Shard = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        shard._name, shard._whole, shard._box, shard._part = name, Box.whole(shape), box, part
        return shard

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answers `narrow` with the part, and anything else from the whole parameter where that is the part."""
        kwargs = kwargs or {}
        if func is torch.Tensor.narrow:
            return args[0]._cut(*args[1:], **kwargs)
        if all(arg._box == arg._whole for arg in args if isinstance(arg, cls)):
            args = [arg._part if isinstance(arg, cls) else arg for arg in args]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuses to be read as a whole that is not there."""
        name = next(arg._name for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, Shard))
        raise ReshardError(f"vLLM's loader uses {func} on the whole of {name!r}, of which this rank holds a part")

    def _cut(self, dim: int, start: int, length: int) -> torch.Tensor:
        whole = self._whole
        dim %= len(whole.shape)
        wanted = Box(
            (*whole.offset[:dim], int(start), *whole.offset[dim + 1 :]),
            (*whole.shape[:dim], int(length), *whole.shape[dim + 1 :]),
        )
        if wanted != self._box and (wanted.numel or self._box.numel):
            raise ReshardError(
                f"vLLM's loader takes {wanted} of {self._name!r}, the layout says {self._box}: this model is not laid "
                "out here as vLLM lays it out"
            )
        return self._part


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
        self._drop_unfinished()
        initialize_layerwise_reload(self.model)
        self._loaded: set[str] = set()

    @torch.no_grad()
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes the shards of some parameters; they are kept until the layer that they are in is complete."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _Shards) -> None:
        """As `update_weights`."""
        self._loaded |= self.model.load_weights(iter(update_info.shards)) or set()

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Packs what is left.

        Raises:
            ReshardError: if vLLM has parameters that no shard reached.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        self._pack_tied()
        names = {name for name, _ in self.model.named_parameters()}
        if missing := sorted(names - self._loaded):
            raise ReshardError(f"vLLM's parameters {missing} were not loaded: their names do not map to the model's")

    def shutdown(self) -> None:
        """Nothing is held."""

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


def register_transfer() -> None:
    """Makes the engine known to vLLM."""
    if TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER, ShardTransferEngine)
