"""Sharded checkpoints of a model and its optimizer with torch.distributed.checkpoint; they load on any rank count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hf_engine.backends._agreement import together
from hf_engine.backends._directories import agree_on_directory, check_directory, write_directory
from hf_engine.backends._optimizer import ShardedAdamW
from hf_protocols.errors import BackendError

__all__ = ["check_sharded", "load_sharded", "save_sharded"]


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


def check_sharded(directory: str | Path, group: dist.ProcessGroup) -> None:
    """Refuses what is not a whole checkpoint, before a weight is touched. Collective.

    Raises:
        BackendError: on every rank, if the directory holds none or a part of one, or is another one on some ranks.
    """
    with together("load", group):
        check_directory(directory)
        path = Path(directory)
        if not (path / ".metadata").is_file():
            is_other = (path / "checkpoint.json").is_file()
            advice = ": it is one of backend 'megatron', load it there" if is_other else " (no .metadata in it)"
            raise BackendError(f"{directory} holds no sharded checkpoint of backend 'fsdp'{advice}")
        for name, size in _file_sizes(path).items():
            found = (path / name).stat().st_size if (path / name).is_file() else 0
            if found < size:
                raise BackendError(
                    f"the checkpoint in {directory} is damaged: {name} has {found} bytes, its .metadata says {size}; "
                    "give a whole one"
                )
    agree_on_directory(Path(directory), group)


def _file_sizes(directory: Path) -> dict[str, int]:
    """Bytes that every file of a checkpoint has at least."""
    try:
        stored = FileSystemReader(directory).read_metadata().storage_data
        sizes: dict[str, int] = {}
        for place in stored.values():
            sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    except Exception as error:  # of a damaged file pickle raises anything
        raise BackendError(f"{directory}/.metadata cannot be read: {type(error).__name__}: {error}") from error
    return sizes


def load_sharded(
    directory: str | Path, model: torch.nn.Module, optimizer: ShardedAdamW | None, group: dist.ProcessGroup
) -> None:
    """Reads what `save_sharded` wrote, cut for this number of ranks, into the live weights. Collective.

    Raises:
        BackendError: if the checkpoint is of another model, or damaged.
    """
    state = _state(model, optimizer)
    if optimizer is not None:
        state["steps"] = 0
    try:
        load(state, checkpoint_id=Path(directory), process_group=group)
    except CheckpointException as error:
        reasons = {f"rank {rank}: {type(each[0]).__name__}: {each[0]}" for rank, each in error.failures.items()}
        raise BackendError(
            f"the checkpoint in {directory} does not fit this model or is damaged: {'; '.join(sorted(reasons))}"
        ) from error
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer.adamw, optim_state_dict=state["optimizer"])
        optimizer.steps = state["steps"]


def _state(model: torch.nn.Module, optimizer: ShardedAdamW | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer.adamw)
    return state
