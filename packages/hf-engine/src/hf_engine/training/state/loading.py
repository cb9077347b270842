"""Loading: files are verified, then described, then compared, and only then read, box by box."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_engine.model_directory import StoredTensor, errors_of, read_header
from hf_engine.process_groups import local_device
from hf_engine.resharding.boxes import Box
from hf_engine.training.state.description import DESCRIPTION, StateDescription
from hf_engine.training.state.files import agree_on_path, agreed, check_files, verify_files
from hf_engine.training.state.generators import derive_generators, fits_generators, parse_generators
from hf_engine.training.state.parts import BUFFERS, MOMENTS, StateParts, StateProgress
from hf_engine.training.state.records import LoadedState, StateFile
from hf_protocols.errors import ModelError, StateError
from hf_protocols.validation import show

__all__ = ["load_parts"]

_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def load_parts(
    directory: str | Path,
    parts: StateParts,
    group: dist.ProcessGroup,
    *,
    files: Sequence[StateFile] | None = None,
    before: Any = None,
) -> tuple[LoadedState, StateProgress]:
    """Fills a backend's tensors and sets the random numbers. Collective; see `TrainBackend.load_state`.

    Args:
        directory: that `save_state` wrote.
        parts: what is filled.
        group: the ranks that load together.
        files: digests to verify.
        before: called when nothing is refused any more, before the first tensor changes.
    """
    rank, world_size, device = dist.get_rank(group), dist.get_world_size(group), local_device()
    path = agree_on_path(directory, "no state was loaded", group)
    with agreed("no state was loaded", group):
        listed = check_files(files)
        if not path.is_dir():
            raise StateError(f"{path} does not exist, or is not a directory. Give what save_state() wrote")
        if listed is not None:
            verify_files(path, listed[rank::world_size])
    with ExitStack() as opened:
        with agreed("no state was loaded", group):
            description = StateDescription.read(path)
            description.check_fits(parts)
            reader = _Reader(path, description, listed, opened)
            reader.check(parts)
            own = description.ranks[rank].generators if description.is_of_layout(parts, world_size) else {}
            keeps = bool(own) and fits_generators(own, device)
            if keeps:
                set_generators = parse_generators(own, device)
            else:
                seed, steps = description.seed, description.progress.optimizer_steps
                set_generators = partial(derive_generators, seed, steps, rank)
        if before is not None:
            before()
        with agreed("no state was loaded", group), torch.no_grad():
            parts.fill(reader.fill)
            for name, buffer in parts.buffers().items():
                reader.fill(BUFFERS, name, Box.whole(buffer.shape), buffer)
            set_generators()
    progress = description.progress
    return (
        LoadedState(
            optimizer_steps=progress.optimizer_steps,
            weight_version=progress.weight_version,
            notice=None if keeps else _note_derived(description, parts, world_size),
        ),
        progress,
    )


class _Reader:
    """Opened files, of which only the ranges that this rank holds are read."""

    def __init__(
        self, directory: Path, description: StateDescription, listed: Sequence[StateFile] | None, opened: ExitStack
    ) -> None:
        self._directory = directory
        self._description = description
        self._listed = None if listed is None else {each.path for each in listed}
        self._stack = opened
        self._headers: dict[str, dict[str, StoredTensor]] = {}
        self._files: dict[str, Any] = {}
        if self._listed is not None and DESCRIPTION not in self._listed:
            raise StateError(f"files: {DESCRIPTION} of {directory} is not listed. Give the files of all ranks")

    def check(self, parts: StateParts) -> None:
        """Refuses files that lack a box that this rank holds, or have it in another shape or dtype."""
        for name, box in parts.held():
            for kind in parts.kinds:
                self._check_box(kind, name, box, "F32" if kind in MOMENTS else _DTYPES.get(self._description.dtype))
        for name, buffer in parts.buffers().items():
            expected = _DTYPES.get(str(buffer.dtype).removeprefix("torch."))
            self._check_box(BUFFERS, name, Box.whole(buffer.shape), expected)

    def fill(self, kind: str, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Copies what is stored of a box."""
        for file, key, stored, part in self._parts(kind, name, box):
            with errors_of("safetensors", f"{self._directory / file} cannot be read"):
                opened = self._open(file)
                found = opened.get_slice(key)[part.slices_in(stored)] if part.shape else opened.get_tensor(key)
            target = tensor[part.slices_in(box)] if part.shape else tensor
            target.copy_(found)

    def _parts(self, kind: str, name: str, box: Box) -> Iterator[tuple[str, str, Box, Box]]:
        for file, key, stored in self._description.pieces_of(kind, name):
            if (part := stored.intersect(box)) is not None:
                yield file, key, stored, part

    def _check_box(self, kind: str, name: str, box: Box, dtype: str | None) -> None:
        parts = []
        for file, key, stored, part in self._parts(kind, name, box):
            path, found = self._directory / file, self._header(file).get(key)
            if found is None:
                raise StateError(f"{path} lacks {show(key)}, which {DESCRIPTION} names: it is damaged")
            if found.shape != stored.shape or (dtype is not None and found.dtype != dtype):
                raise StateError(
                    f"{path} has {show(key)} as {found.dtype} of shape {found.shape}, {DESCRIPTION} says {dtype} of "
                    f"shape {stored.shape}: it is damaged"
                )
            parts.append(part)
        overlaps = any(first.intersect(second) for first, second in combinations(parts, 2))
        if overlaps or sum(part.numel for part in parts) != box.numel:
            raise StateError(
                f"{self._directory / DESCRIPTION} is damaged: the pieces of {kind} of {show(name)} at {box} overlap or "
                "leave gaps. Load another state"
            )

    def _header(self, file: str) -> dict[str, StoredTensor]:
        if file not in self._headers:
            if self._listed is not None and file not in self._listed:
                raise StateError(f"files: {file} of {self._directory} is not listed. Give the files of all ranks")
            try:
                self._headers[file] = read_header(self._directory / file)
            except ModelError as error:
                raise StateError(f"{self._directory}: {error}") from None
        return self._headers[file]

    def _open(self, file: str) -> Any:
        if file not in self._files:
            from safetensors import safe_open

            self._files[file] = self._stack.enter_context(safe_open(self._directory / file, framework="pt"))
        return self._files[file]


def _note_derived(description: StateDescription, parts: StateParts, world_size: int) -> str:
    layouts = [", ".join(f"{name}={value}" for name, value in each.layout.items()) for each in (description, parts)]
    return (
        f"{description.path.parent} was saved by {len(description.ranks)} ranks of {description.backend} "
        f"({layouts[0]}) and loaded by {world_size} of {parts.backend} ({layouts[1]}): the random numbers of every "
        f"rank start from (seed {description.seed}, optimizer step {description.progress.optimizer_steps}, rank)"
    )
