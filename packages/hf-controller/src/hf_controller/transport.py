"""Batches as shared-memory objects: one object per column and shard, so that a reader fetches what it reads.

A jagged column is its flat values plus one length per row; lengths that several columns have in common are stored once.
This module is the seam for another medium: whatever implements :class:`ObjectStore` can carry batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hf_protocols import BatchError, RowSelection

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

__all__ = ["Column", "ObjectStore", "Shard", "as_tensor", "encode_batch"]


class ObjectStore(Protocol):
    """Where columns lie between calls."""

    def put(self, value: Any) -> Any:
        """Store a value for readers anywhere; the answer is its handle. Dropping every handle frees it."""
        ...

    def get(self, handles: Sequence[Any], timeout_s: float) -> list[Any]:
        """The values of ``handles``, arrays without a copy where they are on this machine.

        Raises:
            WorkerTimeoutError: if one is not there in time.
        """
        ...

    def wait(self, handles: Sequence[Any], timeout_s: float) -> None:
        """Wait until the values exist, or never will, without fetching them.

        Raises:
            WorkerTimeoutError: if one is not there in time.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a shard.

    Attributes:
        handle: the array: [rows, *row_shape], or for a jagged column [tokens of all rows, *row_shape].
        dtype: name of the torch type.
        row_shape: shape of one row, or of one token of a jagged column.
        lengths: position in the shard's list of lengths; None for a dense column.
        num_bytes: bytes of the array.
    """

    handle: Any
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
        lengths: handle of a list of int32 arrays [rows], tokens per row; None without jagged columns.
        selection: the rows of the call's input that this rank got; None where the result's rows do not follow them.
        input_rows: rows of the call's whole input; 0 where the result's rows do not follow them.
    """

    num_rows: int
    columns: Mapping[str, Column]
    lengths: Any = None
    selection: RowSelection | None = None
    input_rows: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.num_bytes for column in self.columns.values())


def encode_batch(
    batch: TensorDict, store: ObjectStore, *, selection: RowSelection | None = None, input_rows: int = 0
) -> Shard:
    """Put every column of ``batch`` (batch_size [B]) into ``store``.

    Raises:
        BatchError: for a batch_size that is not one number, or a column that is no tensor or no jagged nested tensor.
    """
    import torch

    if len(batch.batch_size) != 1:
        raise BatchError(f"a batch has batch_size [rows], got {list(batch.batch_size)}: flatten or unsqueeze it first")
    columns: dict[str, Column] = {}
    lengths: list[torch.Tensor] = []
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            raise BatchError(
                f"column {name!r} is a {type(value).__name__}; a batch has tensors only: "
                "encode text as a jagged uint8 column, and flatten nested TensorDicts"
            )
        values, row_lengths = _split_jagged(name, value.detach())
        columns[name] = Column(
            handle=store.put(_as_array(values)),
            dtype=str(values.dtype).removeprefix("torch."),
            row_shape=tuple(values.shape[1:]),
            lengths=None if row_lengths is None else _index_of(row_lengths, lengths),
            num_bytes=values.numel() * values.element_size(),
        )
    return Shard(
        num_rows=int(batch.batch_size[0]),
        columns=columns,
        lengths=store.put([each.numpy() for each in lengths]) if lengths else None,
        selection=selection,
        input_rows=input_rows,
    )


def as_tensor(array: Any, dtype: str | None = None) -> torch.Tensor:
    """View a stored array as a tensor, without a copy. Its memory is shared: read it, never write into it."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


def _split_jagged(name: str, value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values on the host, contiguous, and the int32 lengths of a jagged column."""
    import torch

    if not value.is_nested:
        return value.cpu().contiguous(), None
    if value.layout is not torch.jagged or getattr(value, "_ragged_idx", 1) != 1:
        raise BatchError(
            f"column {name!r} is a nested tensor that is not jagged in dim 1: "
            "make it with torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )
    if value.lengths() is not None:
        rows = value.unbind()
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        return torch.cat(rows).cpu(), lengths
    offsets = value.offsets().cpu()
    values = value.values()[int(offsets[0]) : int(offsets[-1])]
    return values.cpu().contiguous(), offsets.diff().to(torch.int32)


def _index_of(row_lengths: torch.Tensor, known: list[torch.Tensor]) -> int:
    import torch

    for index, other in enumerate(known):
        if torch.equal(row_lengths, other):
            return index
    known.append(row_lengths)
    return len(known) - 1


def _as_array(values: torch.Tensor) -> Any:
    """A numpy view of the same memory; types that numpy lacks are seen as bit patterns of the same width."""
    import torch

    try:
        return values.numpy()
    except TypeError:
        return values.view({1: torch.uint8, 2: torch.int16}[values.element_size()]).numpy()
