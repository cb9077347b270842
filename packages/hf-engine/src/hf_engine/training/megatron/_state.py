"""State of a pipeline stage between steps, for `hf_engine.training.state`: boxes under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from zlib import crc32

import torch
import torch.distributed as dist

from hf_engine.backends.base import TrainConfig
from hf_engine.resharding.boxes import Box
from hf_engine.training.megatron._names import NamedPiece
from hf_engine.training.megatron._stage import PipelineStage
from hf_engine.training.state.description import describe_layout, describe_optimizer
from hf_engine.training.state.parts import MOMENTS, WEIGHTS, FillPiece, StateParts, StoredPiece
from hf_protocols.topology import Topology

__all__ = ["MegatronState"]


class MegatronState(StateParts):
    """The stored tensors of one rank; see `StateParts`.

    Weights are the float32 masters where a stage has them, so that no bit is lost.

    Args:
        stage: of the model.
        topology: its ranks.
        config: it was built with.
        head: of the model.
        seed: it was built with.
    """

    backend = "megatron"
    base = None

    def __init__(self, stage: PipelineStage, topology: Topology, config: TrainConfig, *, head: str, seed: int) -> None:
        self._stage = stage
        self.head, self.seed = head, seed
        self.dtype = stage.layout.dtype if stage.optimizer is None else "float32"
        self.layout = describe_layout(topology)
        self.optimizer = None if stage.optimizer is None else describe_optimizer(config)
        self.kinds = (WEIGHTS,) if stage.optimizer is None else (WEIGHTS, *MOMENTS)
        self.shapes = {stage.stored_name(name): shape for name, shape in stage.layout.shapes.items()}

    def held(self) -> Iterable[tuple[str, Box]]:
        """See `StateParts.held`."""
        for name, boxes in self._stage.layout.boxes_of(dist.get_rank()).items():
            for box in boxes:
                if box.numel:
                    yield self._stage.stored_name(name), box

    def stored(self) -> Iterator[StoredPiece]:
        """See `StateParts.stored`: parameters are gathered over data-parallel ranks, one at a time."""
        rank = dist.get_rank()
        for kind in self.kinds:
            for parameter, live in self._stage.parameters.items():
                whole = self._stage.whole(live, kind)
                for piece in self._stage.pieces(parameter, whole):
                    if self._writer(piece) == rank:
                        yield StoredPiece(kind, self._stage.stored_name(piece.name), piece.box, piece.view)

    def fill(self, fill: FillPiece) -> None:
        """See `StateParts.fill`."""
        optimizer = self._stage.optimizer
        for parameter, live in self._stage.parameters.items():
            for kind in self.kinds:
                whole = torch.zeros_like(live, dtype=torch.float32 if optimizer is not None else live.dtype)
                for piece in self._stage.pieces(parameter, whole):
                    if piece.box.numel:
                        fill(kind, self._stage.stored_name(piece.name), piece.box, piece.view)
                if kind == WEIGHTS:
                    self._stage.assign(live, whole)
                elif optimizer is not None:
                    shard = optimizer.shard(live)
                    shard.tensors[kind].copy_(whole.view(-1)[shard.start : shard.stop])

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """See `StateParts.buffers`: megatron-core's layers do not have buffers."""
        return {}

    def _writer(self, piece: NamedPiece) -> int:
        """One of the ranks that hold a box, the same on all of them, and spread over them by name."""
        layout = self._stage.layout
        holders = [rank for rank in layout.ranks if piece.box in layout.boxes_of(rank).get(piece.name, ())]
        return holders[crc32(piece.name.encode()) % len(holders)]
