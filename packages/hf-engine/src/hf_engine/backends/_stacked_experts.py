"""Experts under the names that they have in files: transformers stacks those of a layer in two parameters.

Layouts, plans and other backends know one matrix of one expert under each name. Here a stacked parameter is taken for
what it holds: views of it, without a copy. transformers' own table of conversions is private to it and names many more
families; this one has those whose names the rest of hf-engine knows. Other models keep the names of their modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout
from hf_protocols.arguments import show
from hf_protocols.errors import ReshardError

__all__ = ["family_of", "layout_in_files", "stack_of", "tensors_in_files"]


class _Files(NamedTuple):
    """How the files of a family name what its modules call `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`."""

    block: str
    matrices: Mapping[str, tuple[str, ...]]
    """By stacked parameter [E, rows, columns]: the matrices that share the rows of every expert."""


_FAMILIES: Mapping[str, _Files] = {
    "mixtral": _Files("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    "qwen3_moe": _Files("mlp", {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}),
}


class _Part(NamedTuple):
    name: str
    shape: tuple[int, ...]
    place: tuple[int | slice, ...]
    """Where it is in the stacked tensor; empty for what is not stacked."""


def family_of(model: Any) -> str:
    """The `model_type` of a model of transformers; empty for another module."""
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def layout_in_files(family: str, layout: WeightLayout) -> WeightLayout:
    """A layout of a model's modules under the names in its files.

    Args:
        family: of the model, by `family_of`.
        layout: which rows of every parameter each rank holds: of stacked experts, which experts.
    """
    if family not in _FAMILIES:
        return layout
    whole: dict[tuple[int, ...], tuple[Box, ...]] = {}

    def held_in_files(held: Mapping[str, tuple[Box, ...]]) -> dict[str, tuple[Box, ...]]:
        named: dict[str, tuple[Box, ...]] = {}
        for name, boxes in held.items():
            for box in boxes:
                for part in _parts(family, name, box.shape, box.offset[0]):
                    is_matrix = bool(part.place)
                    named[part.name] = whole.setdefault(part.shape, (Box.whole(part.shape),)) if is_matrix else boxes
        return named

    shapes = {
        part.name: part.shape for name, shape in layout.shapes.items() for part in _parts(family, name, shape, first=0)
    }
    # Ranks that share one mapping share the renamed one.
    renamed = {id(held): held_in_files(held) for held in {id(held): held for held in layout.boxes.values()}.values()}
    return WeightLayout(
        shapes=shapes, boxes={rank: renamed[id(held)] for rank, held in layout.boxes.items()}, dtype=layout.dtype
    )


def tensors_in_files(
    family: str, tensors: Mapping[str, torch.Tensor], first_rows: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """The same memory under the names in files.

    Args:
        family: of the model, by `family_of`.
        tensors: by name in the model, each with memory.
        first_rows: by name, of which row, or expert, of the whole parameter a tensor begins; 0 by default.
    """
    named = {}
    for name, tensor in tensors.items():
        for part in _parts(family, name, tuple(tensor.shape), (first_rows or {}).get(name, 0)):
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
            f"{len(given)} were given: give views of one tensor like weight_buffers()'s, for all of them at once"
        )
    if _storage_key(first) == _storage_key(own):
        return own
    return first.as_strided(own.shape, own.stride(), own.storage_offset() + shifts.pop())


def _parts(family: str, name: str, shape: tuple[int, ...], first: int) -> list[_Part]:
    files = _FAMILIES.get(family)
    if files is None:
        return [_Part(name, shape, ())]
    module, _, kind = name.replace(".mlp.", f".{files.block}.").rpartition(".")
    matrices = files.matrices.get(kind, ()) if module.endswith(".experts") and len(shape) == 3 else ()
    if not matrices:
        return [_Part(f"{module}.{kind}", shape, ())]
    num_experts, rows, columns = shape
    height = rows // len(matrices)
    return [
        _Part(
            f"{module}.{first + expert}.{matrix}.weight",
            (height, columns),
            (expert, slice(index * height, (index + 1) * height)),
        )
        for expert in range(num_experts)
        for index, matrix in enumerate(matrices)
    ]


def _storage_key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
