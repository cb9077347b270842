"""A forward pass that scored a batch, kept with its graph until the update on the same batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hf_engine.training.micro_batches import MicroBatch
from hf_engine.training.outputs import OutputRequest

if TYPE_CHECKING:
    import torch

__all__ = ["KeptPass", "WeightState", "is_small"]

WeightState = tuple[int, int]
"""Counts by which a backend recognizes its weights: `weight_changes`, and writes to its shards."""

_SHARE = 4
"""Passes that together hold what one micro-batch may: those of an actor, two critics, and the one that is computed."""


class KeptPass(NamedTuple):
    """A pass on a single micro-batch."""

    tokens: Sequence[torch.Tensor]
    """Copies of what `SequenceBatch.list_tokens` gave: the batch's own memory may be written to until the update."""
    micro_batches: Sequence[MicroBatch]
    request: OutputRequest
    weights: WeightState
    """Of the backend when it was computed."""
    outputs: Mapping[str, torch.Tensor]
    """Of the model, with the graph."""

    def serves(self, request: OutputRequest, weights: WeightState) -> bool:
        """Returns True if it has what a pass that is asked for now would compute of the same rows."""
        if self.weights != weights or request.entropy > self.request.entropy:
            return False
        return replace(self.request, entropy=request.entropy) == request

    def select(self, request: OutputRequest) -> dict[str, torch.Tensor]:
        """The outputs that are asked for, by name."""
        return {name: output for name, output in self.outputs.items() if name != "entropy" or request.entropy}


def is_small(micro_batches: Sequence[MicroBatch], most_tokens: int) -> bool:
    """Returns True for a single micro-batch of at most a quarter of `most_tokens` tokens, padding included."""
    return len(micro_batches) == 1 and micro_batches[0].input_ids.numel() * _SHARE <= most_tokens
