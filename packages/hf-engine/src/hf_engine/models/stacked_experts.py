"""Parameters under the names that they have in files: transformers stacks the experts of a layer in two of them.

Layouts, plans and engines know one matrix of one expert under each name. Here a stacked parameter is represented by
views of its parts, without a copy. `conversions` reads the names from transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout
from hf_protocols.errors import ReshardError
from hf_protocols.validation import show

__all__ = ["FileNames", "FilePart", "layout_in_files", "shapes_in_files", "stack_of", "tensors_in_files"]


class FilePart(NamedTuple):
    """A tensor in files that is all of a parameter, or rows of one expert of it."""

    name: str
    expert: int | None = None
    """None for all of the parameter."""
    rows: tuple[int, int] = (0, 0)
    """First row of the expert's, and one after the last."""


FileNames = Mapping[str, tuple[FilePart, ...]]
"""By the name in a model: the tensors in files that make up the parameter. One that is absent keeps its name."""


class _Part(NamedTuple):
    name: str
    shape: tuple[int, ...]
    place: tuple[int | slice, ...]
    """Place in the stacked tensor; empty for a tensor that is not stacked."""


def layout_in_files(names: FileNames, layout: WeightLayout) -> WeightLayout:
    """A layout of a model's modules under the names in its files.

    Args:
        names: of the model.
        layout: which rows of every parameter each rank holds: of stacked experts, which experts.
    """
    if not names:
        return layout
    whole: dict[tuple[int, ...], tuple[Box, ...]] = {}

    def held_in_files(held: Mapping[str, tuple[Box, ...]]) -> dict[str, tuple[Box, ...]]:
        named: dict[str, tuple[Box, ...]] = {}
        for name, boxes in held.items():
            for box in boxes:
                for part in _parts(names, name, box.shape, box.offset[0]):
                    is_matrix = bool(part.place)
                    named[part.name] = whole.setdefault(part.shape, (Box.whole(part.shape),)) if is_matrix else boxes
        return named

    # Ranks that share one mapping share the renamed one.
    renamed = {id(held): held_in_files(held) for held in {id(held): held for held in layout.boxes.values()}.values()}
    return WeightLayout(
        shapes=shapes_in_files(names, layout.shapes),
        boxes={rank: renamed[id(held)] for rank, held in layout.boxes.items()},
        dtype=layout.dtype,
    )


def shapes_in_files(names: FileNames, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of whole parameters by the names in files.

    Args:
        names: of the model.
        shapes: by the names of its modules.
    """
    return {part.name: part.shape for name, shape in shapes.items() for part in _parts(names, name, shape, first=0)}


def tensors_in_files(
    names: FileNames, tensors: Mapping[str, torch.Tensor], first_rows: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """The same memory under the names in files.

    Args:
        names: of the model.
        tensors: by name in the model, each with memory.
        first_rows: by name, of which row, or expert, of the whole parameter a tensor begins; 0 by default.
    """
    if not names:
        return dict(tensors)
    named = {}
    for name, tensor in tensors.items():
        for part in _parts(names, name, tuple(tensor.shape), (first_rows or {}).get(name, 0)):
            named[part.name] = tensor[part.place] if part.place else tensor
    return named


def stack_of(own: torch.Tensor, views: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The parameter whose parts are `given` as `views` are those of `own`.

    Args:
        own: a parameter; memory that was freed may be missing.
        views: its parts by name in files.
        given: like the views in dtype, device, shapes and strides.

    Raises:
        ReshardError: for parts that are not all there, or lie otherwise in their memory than the views.
    """
    name, first = next(iter(given.items()))
    if views[name] is own:
        return first
    shifts = {tensor.storage_offset() - views[each].storage_offset() for each, tensor in given.items()}
    if given.keys() != views.keys() or len(shifts) > 1 or len({_storage_key(each) for each in given.values()}) > 1:
        raise ReshardError(
            f"{show(name)} shares its memory with the other experts of its layer, {len(views)} matrices, of which "
            f"{len(given)} were given. Use views of one tensor like weight_buffers()'s, for all of them at once"
        )
    if _storage_key(first) == _storage_key(own):
        return own
    return first.as_strided(own.shape, own.stride(), own.storage_offset() + shifts.pop())


def _parts(names: FileNames, name: str, shape: tuple[int, ...], first: int) -> list[_Part]:
    """The tensors in files of which a parameter's rows of `shape` from `first` on are a part or all."""
    found = names.get(name, (FilePart(name),))
    return [
        _Part(part.name, shape, ())
        if part.expert is None
        else _Part(part.name, (part.rows[1] - part.rows[0], *shape[2:]), (part.expert - first, slice(*part.rows)))
        for part in found
        if part.expert is None or first <= part.expert < first + shape[0]
    ]


def _storage_key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
