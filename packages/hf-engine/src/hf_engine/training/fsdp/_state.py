"""State of an FSDP2 model between steps, for `hf_engine.training.state`: shards under the names in files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hf_engine.model_directory import VALUE_HEAD
from hf_engine.models.stacked_experts import FileNames, layout_in_files, tensors_in_files
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.training.optimizer import ShardedAdamW, local_shard
from hf_engine.training.state.description import describe_layout, describe_optimizer
from hf_engine.training.state.parts import MOMENTS, WEIGHTS, FillPiece, StateParts, StoredPiece

if TYPE_CHECKING:
    from hf_engine.backends.base import Head, TrainConfig
    from hf_protocols.topology import Topology

__all__ = ["FsdpState", "StateFacts", "digest_base"]


_CHUNK = 1 << 22
"""Elements that are digested at a time."""


@dataclass(frozen=True)
class StateFacts:
    """Facts that an FSDP2 model was built with."""

    topology: Topology
    config: TrainConfig
    _: KW_ONLY
    head: Head
    head_name: str
    """Of the head's weight, by the name of its module; empty for a classifier's."""
    seed: int


class FsdpState(StateParts):
    """The stored tensors of one rank; see `StateParts`. Of a model with adapters, those that are trained.

    Args:
        facts: of the model.
        parameters: sharded ones, by the names of their modules.
        layout: of these, on all ranks.
        file_names: of the model.
        optimizer: of a trained model.
        buffers: persistent ones by the names in files.
    """

    backend = "fsdp"

    def __init__(
        self,
        facts: StateFacts,
        parameters: Mapping[str, torch.nn.Parameter],
        layout: WeightLayout,
        file_names: FileNames,
        optimizer: ShardedAdamW | None,
        *,
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        if facts.config.lora is not None:
            parameters = {name: each for name, each in parameters.items() if each.requires_grad}
            layout = layout.select(list(parameters))
        self._parameters, self._own_layout, self._file_names = parameters, layout, file_names
        self._optimizer, self._buffers = optimizer, buffers
        self._renamed = {facts.head_name: VALUE_HEAD} if facts.head != "lm" and facts.head_name else {}
        self.head, self.seed, self.dtype = str(facts.head), facts.seed, layout.dtype
        self.base: Mapping[str, Any] | None = None
        self.layout = describe_layout(facts.topology)
        self.optimizer = None if optimizer is None else describe_optimizer(facts.config)
        self.kinds = (WEIGHTS,) if optimizer is None else (WEIGHTS, *MOMENTS)
        self._layout = layout_in_files(file_names, layout)
        self.shapes = {self._stored(name): shape for name, shape in self._layout.shapes.items()}

    def held(self) -> Iterable[tuple[str, Box]]:
        """See `StateParts.held`."""
        for name, (box,) in self._layout.boxes_of(dist.get_rank()).items():
            if box.numel:
                yield self._stored(name), box

    def stored(self) -> Iterator[StoredPiece]:
        """See `StateParts.stored`: every shard is on one rank."""
        for kind in self.kinds:
            for name, box, view in self._views(kind):
                yield StoredPiece(kind, name, box, view)

    def fill(self, fill: FillPiece) -> None:
        """See `StateParts.fill`."""
        for kind in self.kinds:
            for name, box, view in self._views(kind):
                if box.numel:
                    fill(kind, name, box, view)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """See `StateParts.buffers`."""
        return self._buffers

    def _views(self, kind: str) -> Iterator[tuple[str, Box, torch.Tensor]]:
        boxes = self._own_layout.boxes_of(dist.get_rank())
        first_rows = {name: box.offset[0] for name, (box,) in boxes.items()}
        tensors = {name: self._shard(kind, parameter) for name, parameter in self._parameters.items()}
        held = self._layout.boxes_of(dist.get_rank())
        for name, view in tensors_in_files(self._file_names, tensors, first_rows).items():
            (box,) = held[name]
            yield self._stored(name), box, view

    def _shard(self, kind: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        if kind == WEIGHTS:
            return local_shard(parameter)
        assert self._optimizer is not None, "or there were no moments"
        return self._optimizer.moment(parameter, kind)

    def _stored(self, name: str) -> str:
        return self._renamed.get(name, name)


@torch.no_grad()
def digest_base(
    shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, tuple[int, torch.Tensor]], group: dist.ProcessGroup
) -> str:
    """Digest of whole float32 parameters, the same over any number of ranks. Collective.

    Args:
        shapes: of all whole parameters.
        held: first row and rows that this rank holds of each.
        group: the ranks that hold all rows.
    """
    sums = []
    for name, (first, rows) in held.items():
        shape = shapes[name]
        bits = rows.reshape(-1).view(torch.int32)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        start = first * math.prod(shape[1:])
        for chunk in torch.split(bits, _CHUNK):
            # Odd factors: no change of a single element is multiplied away. Sums wrap around.
            factors = torch.arange(start, start + len(chunk), device=bits.device) * 2 + 1
            total += (chunk.to(torch.int64) * factors).sum()
            start += len(chunk)
        sums.append(total)
    words = torch.stack(sums)
    dist.all_reduce(words, group=group)
    described = [[name, list(shapes[name]), word] for name, word in zip(held, words.tolist(), strict=True)]
    return hashlib.sha256(json.dumps(sorted(described)).encode()).hexdigest()
