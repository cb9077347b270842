"""Sharded checkpoints: every rank writes boxes under Hugging Face names, so that any layout can read them.

A directory holds `checkpoint.json` and one safetensors file per rank, with tensors called `kind/name@offset`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_engine.backends._agreement import together
from hf_engine.backends._directories import agree_on_directory, check_directory
from hf_engine.backends.megatron._names import Piece
from hf_engine.backends.megatron._optimizer import DistributedAdamW
from hf_engine.backends.megatron._stage import Stage
from hf_engine.model_directory import errors_of
from hf_engine.resharding.boxes import Box
from hf_protocols.arguments import show
from hf_protocols.errors import BackendError
from hf_protocols.outer_files import read_json_object

__all__ = ["StoredShards", "load_sharded", "open_sharded", "write_shard"]

_FORMAT = 1
_DESCRIPTION = "checkpoint.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def write_shard(path: Path, stage: Stage) -> None:
    """Writes this rank's share into a directory. Collective over data-parallel ranks.

    Raises:
        OSError: if the file system refuses, after all collectives.
    """
    rank = dist.get_rank()
    share: dict[str, torch.Tensor] = {}
    for parameter, live in stage.parameters.items():
        for kind in _kinds(stage.optimizer):
            whole = stage.whole(live, kind)
            for piece in stage.pieces(parameter, whole):
                if _writer(stage, piece) == rank:
                    share[_key(kind, piece)] = piece.view.to("cpu").clone(memory_format=torch.contiguous_format)
    try:
        save_file(share, path / f"rank-{rank:05d}.safetensors")
    except SafetensorError as error:  # a full disk, among others
        raise OSError(str(error)) from error
    if rank == 0:
        description = {
            "format": _FORMAT,
            "steps": stage.optimizer.steps if stage.optimizer is not None else 0,
            "kinds": _kinds(stage.optimizer),
            "shapes": stage.layout.shapes,
        }
        (path / _DESCRIPTION).write_text(json.dumps(description) + "\n", encoding="utf-8")


def open_sharded(directory: str | Path, stage: Stage) -> StoredShards:
    """What `write_shard` wrote under any layout, if it fits. Collective.

    Raises:
        BackendError: on every rank, if the directory holds no checkpoint, one that does not fit, or is another one on
            some ranks.
    """
    with together("load", None):
        check_directory(directory)
        stored = StoredShards(Path(directory))
        stored.check(stage, _kinds(stage.optimizer))
    agree_on_directory(Path(directory), None)
    return stored


@torch.no_grad()
def load_sharded(stored: StoredShards, stage: Stage) -> None:
    """Reads weights, and moments where the stage is trained, into the live ones. Collective.

    Raises:
        BackendError: on every rank, if files fail on the way.
    """
    with together("load", None):
        _read(stored, stage)
    if stage.optimizer is not None:
        stage.optimizer.continue_from(stored.steps)


def _read(stored: StoredShards, stage: Stage) -> None:
    optimizer = stage.optimizer
    for parameter, live in stage.parameters.items():
        for kind in _kinds(optimizer):
            whole = torch.zeros_like(live, dtype=torch.float32 if optimizer is not None else live.dtype)
            for piece in stage.pieces(parameter, whole):
                stored.fill(kind, piece)
            if kind == "weight":
                stage.assign(live, whole)
            elif optimizer is not None:
                shard = optimizer.shard(live)
                shard.tensors[kind].copy_(whole.view(-1)[shard.start : shard.stop])


class StoredShards:
    """The boxes of a checkpoint's files, by kind and name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            self._description = read_json_object(BackendError, directory / _DESCRIPTION)
        except BackendError as error:
            raise BackendError(f"{directory} holds no sharded checkpoint of the megatron backend: {error}") from error
        if self._description.get("format") != _FORMAT:
            raise BackendError(
                f"{directory} has the checkpoint format {self._description.get('format')}, this version {_FORMAT}"
            )
        self.steps: int = self._description["steps"]
        self._boxes: dict[str, list[tuple[Box, Any, str]]] = defaultdict(list)
        for path in sorted(directory.glob("rank-*.safetensors")):
            with errors_of("safetensors", f"{path} cannot be read"):
                opened: Any = safe_open(path, framework="pt")
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                name, _, offset = key.rpartition("@")
                start = tuple(int(n) for n in offset.split(",") if n)
                self._boxes[name].append((Box(start, tuple(opened.get_slice(key).get_shape())), opened, key))

    def check(self, stage: Stage, kinds: tuple[str, ...]) -> None:
        """Refuses a checkpoint of another model, without optimizer state where it is needed, or incomplete."""
        if lacking := [kind for kind in kinds if kind not in self._description["kinds"]]:
            raise BackendError(f"{self._directory} was saved from a frozen model: it lacks {', '.join(lacking)}")
        shapes = {name: tuple(shape) for name, shape in self._description["shapes"].items()}
        wanted = stage.layout.shapes
        if differing := sorted(n for n in wanted.keys() | shapes.keys() if wanted.get(n) != shapes.get(n)):
            name = differing[0]
            raise BackendError(
                f"the checkpoint in {self._directory} does not fit this model: {len(differing)} parameters differ, "
                f"such as {show(name)}, which is {wanted.get(name, 'absent')} here and "
                f"{shapes.get(name, 'absent')} there"
            )
        for parameter, live in stage.parameters.items():
            for piece in stage.pieces(parameter, live.detach()):
                for kind in kinds:
                    if sum(part.numel for part, *_ in self._parts(kind, piece)) != piece.box.numel:
                        raise BackendError(
                            f"{self._directory} is incomplete: {kind} of {show(piece.name)} at {piece.box}"
                        )

    def fill(self, kind: str, piece: Piece) -> None:
        for part, container, opened, key in self._parts(kind, piece):
            piece.view[part.slices_in(piece.box)] = opened.get_slice(key)[part.slices_in(container)].to(
                piece.view.device
            )

    def _parts(self, kind: str, piece: Piece) -> Iterator[tuple[Box, Box, Any, str]]:
        for box, opened, key in self._boxes.get(f"{kind}/{piece.name}", ()):
            if (part := box.intersect(piece.box)) is not None:
                yield part, box, opened, key


def _writer(stage: Stage, piece: Piece) -> int:
    """One of the ranks that hold a box, the same for whoever asks, and spread over them by name."""
    holders = [rank for rank in stage.layout.ranks if piece.box in stage.layout.boxes_of(rank).get(piece.name, ())]
    return holders[crc32(piece.name.encode()) % len(holders)]


def _kinds(optimizer: DistributedAdamW | None) -> tuple[str, ...]:
    return ("weight", *_MOMENTS) if optimizer is not None else ("weight",)


def _key(kind: str, piece: Piece) -> str:
    return f"{kind}/{piece.name}@{','.join(map(str, piece.box.offset))}"
