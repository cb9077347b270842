"""Sharded checkpoints of a model and its optimizer with torch.distributed.checkpoint; they load on any rank count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hf_engine.backends._agreement import together
from hf_engine.backends._directories import check_directory, write_directory
from hf_engine.backends._optimizer import ShardedAdamW
from hf_protocols.errors import BackendError

__all__ = ["load_sharded", "save_sharded"]


def save_sharded(
    directory: str | Path, model: torch.nn.Module, optimizer: ShardedAdamW | None, group: dist.ProcessGroup
) -> None:
    """Writes this rank's shards into a directory that appears whole or not at all. Collective."""
    state = _state(model, optimizer)
    if optimizer is not None:
        state["steps"] = optimizer.steps

    def write(path: Path) -> None:
        try:
            save(state, checkpoint_id=path, process_group=group)
        except CheckpointException as error:
            raise OSError(str(error)) from error

    write_directory(directory, write, group)


def load_sharded(
    directory: str | Path, model: torch.nn.Module, optimizer: ShardedAdamW | None, group: dist.ProcessGroup
) -> None:
    """Reads what `save_sharded` wrote, cut for this number of ranks. Collective.

    Raises:
        BackendError: if the directory holds no checkpoint, or one of another model.
    """
    with together("load", group):
        check_directory(directory)
        if not (Path(directory) / ".metadata").is_file():
            raise BackendError(f"{directory} holds no sharded checkpoint (no .metadata in it)")
    state = _state(model, optimizer)
    if optimizer is not None:
        state["steps"] = 0
    try:
        load(state, checkpoint_id=Path(directory), process_group=group)
    except CheckpointException as error:
        raise BackendError(f"the checkpoint in {directory} does not fit this model: {error}") from error
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer.adamw, optim_state_dict=state["optimizer"])
        optimizer.steps = state["steps"]


def _state(model: torch.nn.Module, optimizer: ShardedAdamW | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer.adamw)
    return state
