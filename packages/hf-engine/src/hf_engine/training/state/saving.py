"""Saving: a staged copy on the host, then files, in the background if asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_engine.process_groups import default_timeout, local_device
from hf_engine.resharding.boxes import Box
from hf_engine.training.state.description import DESCRIPTION, RankFiles, StateDescription, file_name, key_of
from hf_engine.training.state.files import (
    agree_on_path,
    agreed,
    listing_name,
    mark_failure,
    remove_marks,
    sync_directory,
    write_json,
    write_listing,
    write_tensors,
)
from hf_engine.training.state.generators import capture_generators
from hf_engine.training.state.parts import BUFFERS, StateParts, StateProgress
from hf_engine.training.state.records import StateFile
from hf_protocols.errors import StateError

__all__ = ["StateWriter"]

_UNFINISHED = "the state is not complete"
_LIBRARIES = ("hf-engine", "torch", "safetensors")


@dataclass
class _Staged:
    """Files that one rank writes."""

    directory: Path
    rank: int
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """By file, then by key."""
    description: dict[str, Any] | None = None
    """On the first rank."""

    def write_in_background(self) -> tuple[StateFile, ...]:
        """Writes all files; a failure leaves a mark for `list_written`, as nobody waits for the files yet."""
        try:
            return self.write()
        except BaseException:
            mark_failure(self.directory, self.rank)
            raise

    def write(self) -> tuple[StateFile, ...]:
        """Writes all files, and the rank's list of them last; removes them again if one fails."""
        names = sorted(self.tensors)
        owned = names if self.description is None else [*names, DESCRIPTION]
        with ExitStack() as undo:
            for name in owned:
                undo.callback(_remove, self.directory / name)
            written = [write_tensors(self.directory / name, self.tensors.pop(name)) for name in names]
            if self.description is not None:
                written.append(write_json(self.directory / DESCRIPTION, self.description))
            sync_directory(self.directory)
            write_listing(self.directory, self.rank, written)
            undo.pop_all()
        return tuple(written)


class StateWriter:
    """Saves states of one rank of a backend, one at a time.

    Args:
        group: the ranks that save together.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: Future[tuple[StateFile, ...]] | None = None
        self._directory = Path()
        self._files: tuple[StateFile, ...] | None = None

    def save(
        self, directory: str | Path, parts: StateParts, progress: StateProgress, *, background: bool = False
    ) -> None:
        """Stages a state and writes it. Collective; see `TrainBackend.save_state`."""
        with agreed("no state was saved", self._group):
            if self._pending is not None:
                raise StateError(
                    f"save_state({str(directory)!r}): the state in {self._directory} is still being written. "
                    "Call finish_state() first"
                )
        target = agree_on_path(directory, "no state was saved", self._group)
        with agreed("no state was saved", self._group):
            if dist.get_rank(self._group) == 0:
                _prepare(target)
        self._files, self._directory = None, target
        staged = self._stage(target, parts, progress)
        # Not a daemon: a program that ends waits for its last state.
        pool = ThreadPoolExecutor(1, thread_name_prefix="save-state")
        self._pending = pool.submit(staged.write_in_background if background else staged.write)
        pool.shutdown(wait=not background)
        if not background:
            self.finish()

    def finish(self, timeout_s: float | None = None) -> tuple[StateFile, ...]:
        """Waits for the files. Collective; see `TrainBackend.finish_state`."""
        with agreed(_UNFINISHED, self._group):
            if self._pending is None and self._files is None:
                raise StateError("finish_state() before save_state(): no state was saved")
            deadline = default_timeout().total_seconds() if timeout_s is None else timeout_s
            if self._pending is not None and wait([self._pending], deadline).not_done:
                raise StateError(
                    f"{self._directory}: the state was not written within {deadline:g} s. Raise timeout_s, or "
                    "look at the file system"
                )
        pending, self._pending = self._pending, None
        try:
            with agreed(_UNFINISHED, self._group):
                if pending is not None:
                    self._files = pending.result()
        except StateError:  # of a rank that could not write: a part of a state only fills the disk
            for written in self._files or ():
                _remove(self._directory / written.path)
            _remove(self._directory / listing_name(dist.get_rank(self._group)))
            self._files = None
            raise
        assert self._files is not None, "else it was refused above"
        return self._files

    @torch.no_grad()
    def _stage(self, directory: Path, parts: StateParts, progress: StateProgress) -> _Staged:
        rank = dist.get_rank(self._group)
        found: dict[str, dict[str, list[tuple[Box, torch.Tensor]]]] = defaultdict(lambda: defaultdict(list))
        for piece in parts.stored():
            if piece.box.numel:
                found[piece.kind][piece.name].append((piece.box, _copy(piece.tensor)))
        boxes: dict[str, tuple[Box, ...]] = {}
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for kind, by_name in found.items():
            joined = {name: _join(pieces) for name, pieces in by_name.items()}
            boxes = {name: tuple(box for box, _ in pieces) for name, pieces in joined.items()}
            tensors[file_name(kind, rank)] = {
                key_of(name, box, boxes[name]): tensor for name, pieces in joined.items() for box, tensor in pieces
            }
        buffers = parts.buffers()
        if buffers and rank == 0:
            tensors[file_name(BUFFERS, rank)] = {name: _copy(buffer) for name, buffer in buffers.items()}
        own = RankFiles(boxes=boxes, generators=capture_generators(local_device()))
        ranks = self._gather(own)
        staged = _Staged(directory, rank, tensors)
        if ranks is not None:
            staged.description = _describe(directory, parts, progress, ranks, buffers)
        return staged

    def _gather(self, own: RankFiles) -> tuple[RankFiles, ...] | None:
        """Returns every rank's files, on the first rank; None on the others. Collective."""
        first, *_ = dist.get_process_group_ranks(self._group)
        is_first = dist.get_rank(self._group) == 0
        gathered: list[Any] | None = [None] * dist.get_world_size(self._group) if is_first else None
        dist.gather_object(own, gathered, dst=first, group=self._group)
        return None if gathered is None else tuple(gathered)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _prepare(directory: Path) -> None:
    """A directory that is there and empty."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_marks(directory)
        present = next(directory.iterdir(), None)
    except OSError as error:
        raise StateError(f"{directory} cannot be written: {error.strerror}") from error
    if present is not None:
        raise StateError(f"{directory} is not empty, it holds {present.name!r}. Save to a new directory")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _join(pieces: list[tuple[Box, torch.Tensor]]) -> list[tuple[Box, torch.Tensor]]:
    """Boxes that follow each other in dim 0 become one."""
    joined: list[tuple[Box, torch.Tensor]] = []
    for box, tensor in sorted(pieces, key=lambda piece: piece[0]):
        before = joined[-1][0] if joined else None
        if before is not None and box.shape and _follows(before, box):
            shape = (before.shape[0] + box.shape[0], *box.shape[1:])
            joined[-1] = (Box(before.offset, shape), torch.cat([joined[-1][1], tensor]))
        else:
            joined.append((box, tensor))
    return joined


def _follows(first: Box, second: Box) -> bool:
    return second.offset == (first.stop[0], *first.offset[1:]) and second.shape[1:] == first.shape[1:]


def _describe(
    directory: Path,
    parts: StateParts,
    progress: StateProgress,
    ranks: tuple[RankFiles, ...],
    buffers: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    description = StateDescription(
        path=directory / DESCRIPTION,
        backend=parts.backend,
        head=parts.head,
        dtype=parts.dtype,
        seed=parts.seed,
        layout=parts.layout,
        optimizer=parts.optimizer,
        base=parts.base,
        kinds=parts.kinds,
        shapes=parts.shapes,
        buffers={name: tuple(buffer.shape) for name, buffer in buffers.items()},
        progress=progress,
        ranks=ranks,
    )
    return description.to_json({library: version(library) for library in _LIBRARIES})
