"""Axis-aligned boxes of integer coordinates: the arithmetic under every weight layout.

A box is a rectangular region of one parameter. Everything here is pure: no tensors, no ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import NoReturn

from hf_protocols.validation import show

__all__ = ["Box", "partition_box", "split_box"]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The region `offset[d] <= index[d] < offset[d] + shape[d]` of an n-dimensional tensor.

    A box with a zero in its shape is empty; a box with no dimensions is one scalar.

    Raises:
        ValueError: if offset and shape are not tuples of whole numbers, have different lengths or hold a negative one.
    """

    offset: tuple[int, ...]
    """First index in every dimension."""
    shape: tuple[int, ...]
    """Number of indices in every dimension."""

    def __post_init__(self) -> None:
        for numbers in (self.offset, self.shape):
            if not isinstance(numbers, tuple):
                self._refuse_kinds()
        if len(self.offset) != len(self.shape):
            raise ValueError(f"offset {self.offset} has {len(self.offset)} dimensions, shape {self.shape} has another")
        for number in (*self.offset, *self.shape):
            if not isinstance(number, int):
                self._refuse_kinds()
            if number < 0:
                raise ValueError(f"a box cannot have negative numbers: offset {self.offset}, shape {self.shape}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers a tensor of this shape."""
        if not isinstance(shape, Sequence):
            raise ValueError(f"shape={show(shape)}. Use a tuple of whole numbers, such as (4, 8)")
        return cls((0,) * len(shape), tuple(shape))

    def _refuse_kinds(self) -> NoReturn:
        raise ValueError(
            f"Box({show(self.offset)}, {show(self.shape)}). Use two tuples of whole numbers, (0, 0) and (4, 8)"
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index in every dimension."""
        return tuple(start + n for start, n in zip(self.offset, self.shape, strict=True))

    def contains(self, other: Box) -> bool:
        """Returns True if every element of `other` is in this box; an empty `other` always is."""
        return other.numel == 0 or self.intersect(other) == other

    def intersect(self, other: Box) -> Box | None:
        """The elements in both boxes, or None where there are none."""
        offset, shape = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start = max(a, b)
            length = min(a + n, b + m) - start
            if length <= 0:
                return None
            offset.append(start)
            shape.append(length)
        return Box(tuple(offset), tuple(shape))

    def slices_in(self, container: Box) -> tuple[slice, ...]:
        """Slices that select this box out of a tensor holding `container`."""
        return tuple(
            slice(start - base, start - base + n)
            for start, base, n in zip(self.offset, container.offset, self.shape, strict=True)
        )


def split_box(box: Box, max_numel: int) -> Iterator[Box]:
    """Cuts a box into boxes of at most `max_numel` elements, in row-major order.

    Leading dimensions are cut first, so that the parts of a contiguous tensor stay contiguous.
    """
    if max_numel < 1:
        raise ValueError(f"max_numel must be at least 1, got {max_numel}")
    if box.numel <= max_numel:
        yield box
        return
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    step = max(1, max_numel // (box.numel // box.shape[dim]))
    for start in range(0, box.shape[dim], step):
        length = min(step, box.shape[dim] - start)
        part = Box(_replaced(box.offset, dim, box.offset[dim] + start), _replaced(box.shape, dim, length))
        yield from split_box(part, max_numel)


def partition_box(box: Box, covers: Sequence[Box]) -> list[tuple[Box, frozenset[int]]]:
    """Cuts `box` along the edges of `covers` into disjoint cells that each cover holds wholly or not at all.

    Returns:
        (cell, indices of the covers that hold it), row-major; neighbours with the same holders are joined.
    """
    overlaps = [(index, overlap) for index, cover in enumerate(covers) if (overlap := box.intersect(cover))]
    edges = [sorted({start, end}) for start, end in zip(box.offset, box.stop, strict=True)]
    for dim, dim_edges in enumerate(edges):
        starts = [overlap.offset[dim] for _, overlap in overlaps]
        stops = [start + overlap.shape[dim] for start, (_, overlap) in zip(starts, overlaps, strict=True)]
        dim_edges[:] = sorted({*dim_edges, *starts, *stops})
    holders: dict[tuple[int, ...], list[int]] = {
        position: [] for position in product(*(range(len(e) - 1) for e in edges))
    }
    for index, overlap in overlaps:
        spans = (
            range(bisect_left(e, a), bisect_left(e, b))
            for e, a, b in zip(edges, overlap.offset, overlap.stop, strict=True)
        )
        for position in product(*spans):
            holders[position].append(index)
    steps = [list(pairwise(dim_edges)) for dim_edges in edges]
    cells = []
    for position, indices in holders.items():
        bounds = [steps[dim][p] for dim, p in enumerate(position)]
        cells.append((Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)), frozenset(indices)))
    for dim in reversed(range(len(box.shape))):
        cells = _joined(cells, dim)
    return cells


def _joined(cells: list[tuple[Box, frozenset[int]]], dim: int) -> list[tuple[Box, frozenset[int]]]:
    """Joins cells that touch along `dim`, agree in the other dimensions and have the same holders."""
    by_column: dict[tuple[object, ...], list[tuple[Box, frozenset[int]]]] = {}
    for cell, holders in cells:
        column = (_replaced(cell.offset, dim, 0), _replaced(cell.shape, dim, 0))
        by_column.setdefault(column, []).append((cell, holders))
    joined: list[tuple[Box, frozenset[int]]] = []
    for column_cells in by_column.values():
        column_cells.sort(key=lambda item: item[0].offset[dim])
        merged = [column_cells[0]]
        for cell, holders in column_cells[1:]:
            last, last_holders = merged[-1]
            if last_holders == holders and last.stop[dim] == cell.offset[dim]:
                merged[-1] = (Box(last.offset, _replaced(last.shape, dim, last.shape[dim] + cell.shape[dim])), holders)
            else:
                merged.append((cell, holders))
        joined.extend(merged)
    return sorted(joined, key=lambda item: item[0].offset)


def _replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
