"""Training low-rank adapters with FSDP2: the base is frozen, sharded with them, and whole where a layer is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_engine.agreement import together
from hf_engine.backends.base import Metrics
from hf_engine.backends.lora_config import LoraConfig
from hf_engine.models.lora import (
    FACTORS,
    adapted_weights,
    adapters_off,
    compute_delta,
    dropping_inputs,
    is_transposed,
    list_heads,
    write_adapter,
)
from hf_engine.models.stacked_experts import layout_in_files, tensors_in_files
from hf_engine.training.directories import check_directory, write_directory
from hf_engine.training.fsdp._backend import FsdpBackend
from hf_engine.training.fsdp._model import gather_on_first
from hf_engine.training.fsdp._state import FsdpState, digest_base
from hf_protocols.errors import BackendError

if TYPE_CHECKING:
    from hf_engine.resharding.layouts import WeightLayout
    from hf_engine.training.micro_batches import MicroBatch

__all__ = ["AdaptedFsdpBackend"]


class AdaptedFsdpBackend(FsdpBackend, is_adapted=True):
    """`FsdpBackend` of a model with adapters; see `SupportsAdapters` for what its own methods mean.

    Without `keep_adapters_apart` its layout and weights are those of the merged model, as others read it: each call of
    `local_weights` adds the adapters to copies of their weights, and the base stays as it was loaded.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self._is_apart = self._is_base = False
        self._base_digest: str | None = None
        self._adapter_changes = 0
        self._adapted = adapted_weights(list(self._parameters))
        self._transposed = {name for name in self._adapted if is_transposed(model, name)}

    @property
    def lora(self) -> LoraConfig:
        """Settings of the adapters."""
        assert self._config.lora is not None, "chosen by it"
        return self._config.lora

    @property
    def base_changes(self) -> int:
        """Grows with every change that is neither a step nor a perturbation of the adapters."""
        return self.weight_changes - self._adapter_changes

    def keep_adapters_apart(self, apart: bool) -> None:
        """Has layout and weights show the base and the adapters, or the merged model."""
        self._is_apart = apart

    def weight_layout(self) -> WeightLayout:
        """dim-0 shards of every parameter; see `keep_adapters_apart`."""
        return super().weight_layout() if self._is_apart else layout_in_files(self._file_names, self._merged())

    def local_weights(self) -> Mapping[str, torch.Tensor]:
        """This rank's shards. For the merged model those that adapters change are copies, and this is collective."""
        if self._is_apart:
            return super().local_weights()
        self._offloaded.require_weights("local_weights")
        self._drop_passes()
        layout, shards = self._whole_model()
        first_rows = {name: box.offset[0] for name, (box,) in layout.boxes_of(dist.get_rank()).items()}
        return tensors_in_files(self._file_names, shards, first_rows)

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Inside, scoring is the base's."""
        self._is_base = True
        try:
            with adapters_off(self._model):
                yield
        finally:
            self._is_base = False

    @contextmanager
    def perturbed_adapters(self, *, seed: int, std: float) -> Iterator[None]:
        """Inside the block, every `B` is drawn; afterwards all are back bit for bit."""
        self._offloaded.require_weights("perturbed_adapters")
        self._drop_passes()
        boxes, shards = self._layout.boxes_of(dist.get_rank()), self._shards()
        names = [name for name in shards if name.endswith(f".{FACTORS[1]}.weight")]
        kept = {name: shards[name].clone() for name in names}
        generator = torch.Generator().manual_seed(seed)
        try:
            for name in names:
                whole = torch.randn(self._layout.shapes[name], generator=generator, dtype=torch.float32) * std
                (box,) = boxes[name]
                start = box.offset[0]
                shards[name].copy_(whole[start : start + box.shape[0]])
            self._note_adapter_change()
            yield
        finally:
            for name, values in kept.items():
                self._shards()[name].copy_(values)
            self._note_adapter_change()

    def _may_keep(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """As of whole weights; not where an update passes other inputs, or other weights."""
        return not self.lora.dropout and not self._is_base and super()._may_keep(micro_batches)

    def _add_gradients(self, *arguments: Any, **options: Any) -> None:
        """As of whole weights; adapters drop inputs, which differ by step, call and rank."""
        if not self.lora.dropout:
            super()._add_gradients(*arguments, **options)
            return
        place = self.optimizer_steps * dist.get_world_size() + dist.get_rank()
        seed = self._adapting[1] * 1_000_003 + place + self._waiting.calls * 1_000_000_007
        with dropping_inputs(self._model, seed=seed):
            super()._add_gradients(*arguments, **options)

    def _take_step(self, method: str) -> Metrics:
        before = self.weight_changes
        metrics = super()._take_step(method)
        self._adapter_changes += self.weight_changes - before  # none if the step was skipped
        return metrics

    def export_adapter(self, directory: str | Path, *, base: str) -> None:
        """Writes the adapters in peft's format; see `SupportsAdapters`."""
        self._offloaded.require_weights("export_adapter")
        with together("nothing was written", self._group):
            check_directory(directory)
            if self._head != "lm" and self._head_name:
                raise BackendError(
                    "export_adapter: peft has no format for a value head on a language model. Use export_hf"
                )
        written = [f"{name.removesuffix('weight')}{each}.weight" for name in self._adapted for each in FACTORS]
        written += list_heads(self._model)
        layout, shards = _select(self._layout, written), {name: self._shards()[name] for name in written}
        full = gather_on_first(layout, shards, self._ranks, self._group, self._device)

        def write(path: Path) -> None:
            if dist.get_rank(self._group) == 0:
                write_adapter(path, full, self.lora, self._model, head=self._head, base=base)

        write_directory(directory, write, self._group)

    def load_hf(self, directory: str | Path) -> None:
        """Replaces the base; adapters and optimizer start again. See `TrainBackend.load_hf`."""
        self._base_digest = None
        super().load_hf(directory)

    def _state_parts(self, method: str) -> FsdpState:
        parts = super()._state_parts(method)
        if self._base_digest is None:
            boxes, shards = self._layout.boxes_of(dist.get_rank()), self._shards()
            base = [name for name, parameter in self._parameters.items() if not parameter.requires_grad]
            held = {name: (boxes[name][0].offset[0], shards[name]) for name in base}
            self._base_digest = digest_base(self._layout.shapes, held, self._group)
        parts.base = {"alpha": float(self.lora.alpha), "digest": self._base_digest}
        return parts

    def _note_adapter_change(self) -> None:
        self._weight_changes += 1
        self._adapter_changes += 1

    def _merged(self) -> WeightLayout:
        names = [name for name in self._layout.shapes if not any(f".{factor}." in name for factor in FACTORS)]
        return _select(self._layout, names)

    @torch.no_grad()
    def _whole_model(self) -> tuple[WeightLayout, Mapping[str, torch.Tensor]]:
        layout, shards = self._merged(), self._shards()
        boxes = layout.boxes_of(dist.get_rank())
        for name in self._adapted:
            a, b = (self._whole(f"{name.removesuffix('weight')}{factor}.weight") for factor in FACTORS)
            (box,) = boxes[name]
            rows = slice(box.offset[0], box.offset[0] + box.shape[0])
            delta = compute_delta(a, b, self.lora, rows, transposed=name in self._transposed)
            shards[name] = shards[name] + delta
        return layout, {name: shards[name] for name in layout.shapes}

    def _whole(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name].detach()
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _select(layout: WeightLayout, names: list[str]) -> WeightLayout:
    # Ranks that share one mapping share what is left of it.
    kept = {id(held): {name: held[name] for name in names if name in held} for held in layout.boxes.values()}
    boxes = {rank: kept[id(held)] for rank, held in layout.boxes.items()}
    return replace(layout, shapes={name: layout.shapes[name] for name in names}, boxes=boxes)
