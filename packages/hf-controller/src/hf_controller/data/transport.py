"""Batches as shared-memory objects: one object per shard, with one array per column.

A jagged column is its flat values plus one length per row; lengths that several columns have in common are stored once.
Readers on the producer's machine see the arrays without a copy, so that a column they do not read costs nothing;
readers elsewhere ask for the rows and columns they need. Another medium can be plugged in here: any implementation of
`ObjectStore` can carry batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hf_protocols import RowSelection

if TYPE_CHECKING:
    import torch

__all__ = ["Column", "ObjectStore", "Shard", "SliceReply", "SliceRequest", "as_tensor", "take_slices"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a shard.

    Attributes:
        position: which of the shard's arrays it is: [rows, *row_shape], or for a jagged column
            [tokens of all rows, *row_shape].
        dtype: name of the torch type.
        row_shape: shape of one row, or of one token of a jagged column.
        lengths: which of the shard's arrays has its tokens per row, int32 [rows]; None for a dense column.
        num_bytes: bytes of the array.
    """

    position: int
    dtype: str
    row_shape: tuple[int, ...]
    lengths: int | None
    num_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """The metadata of what one rank returned: small, and all that a reader needs to find its rows.

    Attributes:
        num_rows: rows in this shard.
        columns: the columns by name.
        arrays: handle of the list of arrays.
        origin: where they lie, as the producer's store says.
        selection: the rows of the call's input that this rank got; None where the result's rows do not follow them.
        input_rows: rows of the call's whole input; 0 where the result's rows do not follow them.
    """

    num_rows: int
    columns: Mapping[str, Column]
    arrays: Any
    origin: Any = None
    selection: RowSelection | None = None
    input_rows: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.num_bytes for column in self.columns.values())


@dataclass(frozen=True)
class SliceRequest:
    """Rows of some columns of a shard.

    Attributes:
        columns: (position, lengths) of each column.
        rows: the rows, in ascending order.
        lengths: positions of lengths that are wanted without a column.
    """

    columns: tuple[tuple[int, int | None], ...]
    rows: RowSelection
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class SliceReply:
    """Reply to a request for a slice: the rows' values of each column, and their lengths by position."""

    values: Sequence[Any]
    lengths: Mapping[int, Any]


class ObjectStore(Protocol):
    """Storage of batches between calls."""

    @property
    def origin(self) -> Any:
        """Location of this process's objects; it travels with a shard's metadata."""
        ...

    def put(self, value: Any) -> Any:
        """Stores a list of arrays for readers anywhere and returns its handle. Dropping every handle frees it."""
        ...

    def get(self, handles: Sequence[Any], timeout_s: float) -> list[Any]:
        """The values of `handles`, arrays without a copy where they are on this machine.

        Raises:
            WorkerTimeoutError: if one is not there in time.
        """
        ...

    def wait(self, handles: Sequence[Any], timeout_s: float) -> None:
        """Waits until the values exist or it is known that they never will, without fetching them.

        Raises:
            WorkerTimeoutError: if neither is known in time.
        """
        ...

    def is_far(self, origin: Any) -> bool:
        """Returns True if objects of `origin` are on another machine and available in slices."""
        ...

    def request(self, shard: Shard, request: SliceRequest) -> Any:
        """Asks the process of a shard on another machine for a slice; returns the handle of a `SliceReply`."""
        ...


def take_slices(arrays: Sequence[Any], request: SliceRequest) -> SliceReply:
    """Cuts `request` out of a shard's arrays."""
    import torch

    starts: dict[int, torch.Tensor] = {}
    lengths = {}
    for position in (*request.lengths, *(of_lengths for _, of_lengths in request.columns)):
        if position is not None and position not in lengths:
            every = as_tensor(arrays[position])
            lengths[position] = _cut(every, request.rows.intervals).numpy()
            starts[position] = torch.nn.functional.pad(every.cumsum(0, dtype=torch.int64), (1, 0))
    values = []
    for position, of_lengths in request.columns:
        intervals = request.rows.intervals
        if of_lengths is not None:
            first = starts[of_lengths]
            intervals = tuple((int(first[low]), int(first[high])) for low, high in intervals)
        values.append(_cut(as_tensor(arrays[position]), intervals).numpy())
    return SliceReply(values, lengths)


def as_tensor(array: Any, dtype: str | None = None) -> torch.Tensor:
    """Views a stored array as a tensor, without a copy. The memory is shared: read it, never write into it."""
    import torch

    if array.flags.writeable:
        tensor = torch.from_numpy(array)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


def _cut(values: torch.Tensor, intervals: Sequence[tuple[int, int]]) -> torch.Tensor:
    import torch

    pieces = [values[low:high] for low, high in intervals]
    return values[:0] if not pieces else pieces[0] if len(pieces) == 1 else torch.cat(pieces)
