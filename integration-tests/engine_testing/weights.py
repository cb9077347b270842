"""Weights in which every element says where it belongs, cut as a layout says, in plain torch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import prod

import torch

from hf_engine.resharding.layouts import WeightLayout

__all__ = ["cut_weights", "empty_weights", "numbered_weights"]

_Parts = dict[str, list[torch.Tensor]]


def numbered_weights(
    shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32", *, version: int = 0
) -> dict[str, torch.Tensor]:
    """Whole tensors whose elements are numbers scattered by name, index and version.

    A piece of a wrong place, name or version shows: float32 and wider distinguish 2^23 of them, 16-bit dtypes fewer.
    """
    weights = {}
    for name, shape in shapes.items():
        index = torch.arange(prod(shape), dtype=torch.int64) + zlib.crc32(name.encode()) + 7919 * version
        # An odd multiplier permutes the residues, so neighbours are far from each other.
        scattered = (index * 2654435761) % (1 << 23)
        weights[name] = (scattered.double() / (1 << 22) - 1).to(getattr(torch, dtype)).reshape(shape)
    return weights


def cut_weights(layout: WeightLayout, rank: int, full: Mapping[str, torch.Tensor]) -> _Parts:
    """Copies of what a rank holds of whole tensors, each box sliced by itself, in the layout's dtype."""
    dtype = getattr(torch, layout.dtype)
    parts: _Parts = {}
    for name, boxes in layout.boxes_of(rank).items():
        slices = [tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True)) for box in boxes]
        parts[name] = [full[name][region].to(dtype, copy=True).contiguous() for region in slices]
    return parts


def empty_weights(layout: WeightLayout, rank: int) -> _Parts:
    """A rank's tensors before anything arrived: NaN in every element, each tensor in a storage of its own."""
    dtype = getattr(torch, layout.dtype)
    return {
        name: [torch.full(box.shape, float("nan"), dtype=dtype) for box in boxes]
        for name, boxes in layout.boxes_of(rank).items()
    }
