"""Weight layouts: which boxes of which parameters every rank holds. Pure, no tensors.

Parameters carry their Hugging Face names; a tied embedding appears once, under the name that the model keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from numbers import Integral

from hf_engine.resharding.boxes import Box
from hf_protocols.errors import ReshardError
from hf_protocols.validation import Checks, describe_names, show

__all__ = ["DTYPE_BYTES", "BoxNumbers", "WeightLayout", "fsdp_layout", "replicated_layout", "spread_layout"]

_check = Checks(ReshardError)

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the dtypes that weights may have, by torch's names."""


class BoxNumbers:
    """Gives equal tuples of boxes equal numbers.

    Layouts of thousands of ranks share their tuples: known by its identity, a tuple is hashed once.
    """

    def __init__(self) -> None:
        self._by_identity: dict[int, int] = {}
        self._by_value: dict[tuple[Box, ...], int] = {}

    def of(self, boxes: tuple[Box, ...]) -> int:
        """The number of a tuple that lives as long as this object."""
        number = self._by_identity.get(id(boxes))
        if number is None:
            number = self._by_identity[id(boxes)] = self._by_value.setdefault(boxes, len(self._by_value))
        return number


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """The boxes of every parameter that each rank holds.

    For example two ranks that hold the halves of one matrix:
    `WeightLayout(shapes={"w": (4, 8)}, boxes={0: {"w": (Box((0, 0), (2, 8)),)}, 1: {"w": (Box((2, 0), (2, 8)),)}})`.

    Raises:
        ReshardError: for a box outside its parameter, boxes of one rank that overlap, an unknown name or dtype.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Full shape of every parameter."""
    boxes: Mapping[int, Mapping[str, tuple[Box, ...]]]
    """By rank, then by name. A name that is absent means that the rank holds nothing of it."""
    dtype: str = "float32"
    """dtype of the tensors, by torch's name; bytes of a transfer are counted in the target's."""

    def __post_init__(self) -> None:
        _check.one_of("dtype", self.dtype, DTYPE_BYTES)
        object.__setattr__(self, "shapes", _full_shapes(self.shapes))
        _check.kind("boxes", self.boxes, Mapping, "a mapping from ranks to what they hold")
        # Ranks share mappings and parameters of one shape share boxes: thousands of ranks cost a few checks.
        checked: set[tuple[object, ...]] = set()
        for rank in self.boxes:
            _check.count("a rank", rank, least=0)
        for rank, held in {id(held): (rank, held) for rank, held in self.boxes.items()}.values():
            if not isinstance(held, Mapping):
                raise ReshardError(f"rank {rank} holds {show(held)}. Use a mapping from names to tuples of Box")
            for name, boxes in held.items():
                key = (self.shapes.get(name), id(boxes))
                if key not in checked:
                    self._check_boxes(rank, name, boxes)
                    checked.add(key)

    def _check_boxes(self, rank: int, name: str, boxes: tuple[Box, ...]) -> None:
        if name not in self.shapes:
            raise ReshardError(f"rank {rank} holds {show(name)}, which has no shape in this layout")
        _check.kind(f"rank {rank}: boxes of {show(name)}", boxes, tuple, "a tuple of Box")
        for box in boxes:
            _check.kind(f"rank {rank}: box of {show(name)}", box, Box, "a Box")
        whole = Box.whole(self.shapes[name])
        for box in boxes:
            if len(box.shape) != len(whole.shape) or not whole.contains(box):
                raise ReshardError(f"rank {rank}: {box} is not inside {show(name)} of shape {self.shapes[name]}")
        for first, second in combinations(boxes, 2):
            if overlap := first.intersect(second):
                raise ReshardError(f"rank {rank}: two boxes of {show(name)} overlap in {overlap}; hold it once")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that the layout names, ascending."""
        return tuple(sorted(self.boxes))

    @property
    def element_bytes(self) -> int:
        """Bytes per element."""
        return DTYPE_BYTES[self.dtype]

    def boxes_of(self, rank: int) -> Mapping[str, tuple[Box, ...]]:
        """Returns the boxes of one rank; empty for a rank that the layout does not name."""
        return self.boxes.get(rank, {})

    def select(self, names: Collection[str]) -> WeightLayout:
        """The layout of some parameters, on the same ranks."""
        self._check_names(names)
        # Ranks that share one mapping share the selected one.
        selected = {
            id(held): {name: held[name] for name in names if name in held}
            for held in {id(held): held for held in self.boxes.values()}.values()
        }
        return WeightLayout(
            shapes={name: self.shapes[name] for name in names},
            boxes={rank: selected[id(held)] for rank, held in self.boxes.items()},
            dtype=self.dtype,
        )

    def _check_names(self, names: object) -> None:
        if isinstance(names, str) or not isinstance(names, Collection):
            raise ReshardError(f"names={show(names)}. Use a list of parameters' names")
        for name in names:
            if not isinstance(name, str) or name not in self.shapes:
                known = f"the layout's {len(self.shapes)} parameters, such as {show(next(iter(self.shapes), None))}"
                raise ReshardError(f"names holds {show(name)}, which is none of {known}")

    def held_bytes(self, rank: int) -> int:
        """Bytes that one rank holds."""
        held = self.boxes_of(rank).values()
        return sum(box.numel for boxes in held for box in boxes) * self.element_bytes


def fsdp_layout(shapes: Mapping[str, Sequence[int]], ranks: Iterable[int], *, dtype: str = "float32") -> WeightLayout:
    """FSDP2's layout: dimension 0 of every parameter in chunks of `ceil(rows / ranks)`, as torch.chunk cuts it.

    The last ranks may hold a shorter chunk or an empty one: `[1, h]` on two ranks leaves rank 1 an empty box.

    Args:
        shapes: full shape by Hugging Face name; every parameter needs at least one dimension.
        ranks: the data-parallel ranks in shard order.
        dtype: dtype of the shards.
    """
    members, full = _members(ranks), _full_shapes(shapes)
    if scalars := [name for name, shape in full.items() if not shape]:
        raise ReshardError(f"FSDP shards dimension 0, which the scalars {describe_names(scalars)} do not have")
    boxes = {}
    for index, rank in enumerate(members):
        chunks = {shape: (_chunk(shape, index, len(members)),) for shape in set(full.values())}
        boxes[rank] = {name: chunks[shape] for name, shape in full.items()}
    return WeightLayout(shapes=full, boxes=boxes, dtype=dtype)


def replicated_layout(
    shapes: Mapping[str, Sequence[int]], ranks: Iterable[int], *, dtype: str = "float32"
) -> WeightLayout:
    """Every rank holds every parameter whole."""
    members, full = _members(ranks), _full_shapes(shapes)
    whole = {name: (Box.whole(shape),) for name, shape in full.items()}
    return WeightLayout(shapes=full, boxes=dict.fromkeys(members, whole), dtype=dtype)


def spread_layout(shapes: Mapping[str, Sequence[int]], ranks: Iterable[int], *, dtype: str = "float32") -> WeightLayout:
    """Every parameter whole on one rank, about as many elements on each: for ranks that write a model together."""
    members, full = _members(ranks), _full_shapes(shapes)
    taken = dict.fromkeys(members, 0)
    owners = {}
    for name in sorted(full, key=lambda name: -prod(full[name])):
        owners[name] = min(taken, key=lambda rank: taken[rank])
        taken[owners[name]] += prod(full[name])
    boxes = {
        rank: {name: (Box.whole(shape),) for name, shape in full.items() if owners[name] == rank} for rank in taken
    }
    return WeightLayout(shapes=full, boxes=boxes, dtype=dtype)


def _members(ranks: Iterable[int]) -> tuple[int, ...]:
    _check.kind("ranks", ranks, Iterable, "the ranks in order, such as range(4)")
    members = tuple(ranks)
    for rank in members:
        _check.count("a rank", rank, least=0)
    if not members:
        raise ReshardError("ranks=[]. Use at least one rank")
    if len(set(members)) < len(members):
        raise ReshardError(f"ranks={list(members)}. Name every rank once")
    return members


def _full_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    _check.kind("shapes", shapes, Mapping, 'full shapes by name, {"w": (4, 8)}')
    for name, shape in shapes.items():
        _check.kind("the name of a parameter", name, str, "a string")
        if not _is_shape(shape):
            raise ReshardError(f"the shape of {show(name)}={show(shape)}. Use a tuple of whole numbers, such as (4,)")
    return {name: tuple(map(int, shape)) for name, shape in shapes.items()}


def _is_shape(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, bytes) or any(isinstance(size, bool) for size in value):
        return False
    return all(isinstance(size, Integral) and int(size) >= 0 for size in value)


def _chunk(shape: tuple[int, ...], index: int, num_chunks: int) -> Box:
    rows = shape[0]
    size = -(-rows // num_chunks)
    start = min(index * size, rows)
    return Box((start, *(0 for _ in shape[1:])), (min(size, rows - start), *shape[1:]))
