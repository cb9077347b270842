"""Batches as shared-memory objects: one object per shard, with one array per column.

A jagged column is its flat values plus one length per row; lengths that several columns have in common are stored once.
Readers on the producer's machine see the arrays without a copy, so that a column they do not read costs nothing;
readers elsewhere ask for the rows and columns they need. This module is the seam for another medium: any
implementation of `ObjectStore` can carry batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hf_protocols import BatchError, RowSelection
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

__all__ = ["Column", "ObjectStore", "Shard", "SliceReply", "SliceRequest", "as_tensor", "encode_batch", "take_slices"]

_check = Checks(BatchError)


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
        """Store a list of arrays for readers anywhere; the answer is its handle. Dropping every handle frees it."""
        ...

    def get(self, handles: Sequence[Any], timeout_s: float) -> list[Any]:
        """The values of `handles`, arrays without a copy where they are on this machine.

        Raises:
            WorkerTimeoutError: if one is not there in time.
        """
        ...

    def wait(self, handles: Sequence[Any], timeout_s: float) -> None:
        """Wait until the values exist, or never will, without fetching them.

        Raises:
            WorkerTimeoutError: if that is not so in time.
        """
        ...

    def is_far(self, origin: Any) -> bool:
        """Returns True if objects of `origin` are on another machine and available in slices."""
        ...

    def request(self, shard: Shard, request: SliceRequest) -> Any:
        """Ask a far shard's process for a slice; the answer is the handle of a `SliceReply`."""
        ...


def encode_batch(
    batch: TensorDict, store: ObjectStore, *, selection: RowSelection | None = None, input_rows: int = 0
) -> Shard:
    """Put the columns of `batch` (batch_size [B]) into `store`.

    Raises:
        BatchError: for a batch_size that is not one number, a column that is not a dense or jagged tensor, or a
            column's name that ends in `?`.
    """
    from tensordict import TensorDictBase

    if not isinstance(batch, TensorDictBase):
        raise BatchError(f"a batch is a TensorDict with batch_size [rows], got a {type(batch).__name__}")
    if len(batch.batch_size) != 1:
        raise BatchError(f"a batch has batch_size [rows], got {list(batch.batch_size)}: flatten or unsqueeze it first")
    arrays: list[torch.Tensor] = []
    lengths: dict[str, torch.Tensor] = {}
    names = [str(name) for name in batch.keys()]  # noqa: SIM118 - a TensorDict iterates its rows
    _check.columns("a batch's columns", names, may_lack=False)
    for name in names:
        values, row_lengths = _split_jagged(name, _get_column(batch, name))
        arrays.append(values)
        if row_lengths is not None:
            lengths[name] = row_lengths
    positions = {name: _append_once(arrays, row_lengths, len(names)) for name, row_lengths in lengths.items()}
    columns = {
        name: Column(
            position=position,
            dtype=str(values.dtype).removeprefix("torch."),
            row_shape=tuple(values.shape[1:]),
            lengths=positions.get(name),
            num_bytes=values.numel() * values.element_size(),
        )
        for position, (name, values) in enumerate(zip(names, arrays, strict=False))
    }
    return Shard(
        num_rows=int(batch.batch_size[0]),
        columns=columns,
        arrays=store.put([_as_array(values) for values in arrays]),
        origin=store.origin,
        selection=selection,
        input_rows=input_rows,
    )


def _get_column(batch: TensorDict, name: str) -> Any:
    try:
        return batch.get(name)
    except RuntimeError as error:  # a lazy stack of rows of different shapes
        raise BatchError(
            f"column {name} has rows of different shapes, which make no tensor: give rows of different lengths as a "
            "jagged nested tensor"
        ) from error


def take_slices(arrays: Sequence[Any], request: SliceRequest) -> SliceReply:
    """Cut `request` out of a shard's arrays."""
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
    """View a stored array as a tensor, without a copy. Its memory is shared: read it, never write into it."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


def _cut(values: torch.Tensor, intervals: Sequence[tuple[int, int]]) -> torch.Tensor:
    import torch

    pieces = [values[low:high] for low, high in intervals]
    return values[:0] if not pieces else pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _split_jagged(name: str, value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values on the host, contiguous, and the int32 lengths of a jagged column."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise BatchError(
            f"column {show(name)} is a {type(value).__name__}; a batch has tensors only: "
            "encode text as a jagged uint8 column, and flatten nested TensorDicts"
        )
    _check_storable(name, value)
    value = value.detach()
    if not value.is_nested:
        return value.cpu().resolve_conj().resolve_neg().contiguous(), None
    if value.layout is not torch.jagged or getattr(value, "_ragged_idx", 1) != 1:
        raise BatchError(
            f"column {show(name)} is a nested tensor that is not jagged in dim 1: "
            "make it with torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )
    if value.lengths() is not None:
        rows = value.unbind()
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        return torch.cat(rows).cpu(), lengths
    offsets = value.offsets().cpu()
    values = value.values()[int(offsets[0]) : int(offsets[-1])]
    return values.cpu().contiguous(), offsets.diff().to(torch.int32)


def _check_storable(name: str, value: torch.Tensor) -> None:
    """Refuse what are not values of a type in one piece of memory."""
    import torch

    if value.is_meta:
        raise BatchError(f"column {show(name)} is on the device meta and has no values: compute it first")
    if not value.is_nested and value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        raise BatchError(f"column {show(name)} is {layout}: make it dense, with .to_dense()")
    if value.is_quantized:
        raise BatchError(f"column {show(name)} is quantized: make it numbers, with .dequantize()")
    if value.dtype is torch.complex32:
        raise BatchError(f"column {show(name)} is complex32, which numpy lacks: make it another type, with .to(dtype)")


def _append_once(arrays: list[torch.Tensor], row_lengths: torch.Tensor, begin: int) -> int:
    """Position of `row_lengths` among the arrays from `begin` on, appended if it is not there."""
    import torch

    for position in range(begin, len(arrays)):
        if torch.equal(row_lengths, arrays[position]):
            return position
    arrays.append(row_lengths)
    return len(arrays) - 1


def _as_array(values: torch.Tensor) -> Any:
    """A numpy view of the same memory; types that numpy lacks are seen as bit patterns of the same width."""
    import torch

    try:
        return values.numpy()
    except TypeError:
        return values.view({1: torch.uint8, 2: torch.int16}[values.element_size()]).numpy()
