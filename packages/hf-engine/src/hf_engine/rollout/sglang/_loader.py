"""Weights that arrive as shards, inside SGLang's processes: its own loaders place them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_engine.rollout.sglang._adapters import unwrapped
from hf_engine.rollout.sglang._staging import read_staging, write_report
from hf_engine.rollout.shard import ShardTensor
from hf_protocols.errors import ReshardError
from hf_protocols.foreign_code import Caught

__all__ = ["load_staged"]


@torch.no_grad()
def load_staged(model: Any, messages: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Loads what a training rank left in its staging memory; what fails is reported there.

    SGLang's scheduler would not survive an exception here.

    Args:
        model: of this tensor-parallel rank.
        messages: one, whose name is the description that `Staging.fill` wrote.
    """
    ((description, _),) = messages
    memory, found = read_staging(description)
    shards = [(name, ShardTensor(name, shape, box, part)) for name, shape, box, part in found]
    with Caught() as caught:
        with unwrapped(model):
            model.load_weights(iter(shards))
        if unused := sorted(name for name, shard in shards if not shard.is_used):
            raise ReshardError(f"SGLang's {type(model).__name__} has no place for the parameters {unused}")
    if caught.error is not None:  # the rank that sent the shards reads it
        write_report(memory, f"{type(caught.error).__name__}: {caught.error}")
