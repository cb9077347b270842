"""Between jagged columns [B, ragged] and padded tensors [b, T]: only backends pad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_protocols.errors import BatchError
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Places", "Ragged", "read_candidates", "read_ids", "require_columns", "to_jagged"]

_check = Checks(BatchError)


class Places(NamedTuple):
    """Indices into a flat tensor, by row and column of the padded one."""

    indices: torch.Tensor
    """int64 [b, width], 0 where the mask is False."""
    mask: torch.Tensor
    """bool [b, width]."""


@dataclass(frozen=True)
class Ragged:
    """The rows of a jagged column as one flat tensor: row i is `values[starts[i] : starts[i] + lengths[i]]`."""

    column: Any
    """The nested tensor, in jagged layout."""

    @cached_property
    def values(self) -> torch.Tensor:
        """All rows, one after the other; there may be holes between them."""
        values: torch.Tensor = self.column.values()
        return values

    @cached_property
    def starts(self) -> torch.Tensor:
        """int64 [B]."""
        return self._stored_offsets[:-1]

    @cached_property
    def lengths(self) -> torch.Tensor:
        """int64 [B]."""
        lengths: torch.Tensor | None = self.column.lengths()
        return self._stored_offsets.diff() if lengths is None else lengths

    @cached_property
    def offsets(self) -> torch.Tensor:
        """int64 [B + 1], of the same rows packed without holes; the column's own where it has no holes."""
        if self.column.lengths() is None and int(self._stored_offsets[0]) == 0:
            return self._stored_offsets
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @property
    def packed(self) -> torch.Tensor:
        """All rows, one after the other, without holes."""
        if self.offsets is self._stored_offsets:
            return self.values[: int(self.offsets[-1])]
        rows = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        return torch.cat([self.values[:0], *(self.values[start : start + length] for start, length in rows)])

    def row(self, index: int) -> torch.Tensor:
        """The elements of one row."""
        start, length = self.bounds[index]
        return self.values[start : start + length]

    def pad_right(self, rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [b] as a padded tensor [b, width, ...], zeros after each row's end, and the mask [b, width] of the rest.

        A token's value may be a number or a tensor of its own, such as k log-probs.
        """
        places = self.places_right(rows, width)
        return self.gather(places), places.mask

    def places_right(self, rows: torch.Tensor, width: int) -> Places:
        """Returns the places of `pad_right`, the same for columns of equal `alignment`."""
        steps = torch.arange(width)
        mask = steps < self.lengths[rows, None]
        return Places((self.starts[rows, None] + steps).masked_fill_(~mask, 0), mask)

    def pad_left(self, rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [b] as a padded tensor [b, width], zeros before each row's start, and the mask of real elements."""
        shift = torch.arange(width) - (width - self.lengths[rows, None])
        mask = shift >= 0
        return self.gather(Places((self.starts[rows, None] + shift).masked_fill_(~mask, 0), mask)), mask

    def gather(self, places: Places) -> torch.Tensor:
        """The elements [b, width, ...] at these places, zeros where the mask is False."""
        row_shape = self.values.shape[1:]
        if not len(self.values):
            return self.values.new_zeros(*places.mask.shape, *row_shape)
        mask = places.mask.view(*places.mask.shape, *(1 for _ in row_shape))
        return self.values[places.indices].masked_fill_(~mask, 0)

    @property
    def alignment(self) -> tuple[int, int]:
        """Equal for columns with the same offsets and lengths tensors, as long as both columns live."""
        return id(self._stored_offsets), id(self.column.lengths())

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """Start and length of every row."""
        return list(zip(self.starts.tolist(), self.lengths.tolist(), strict=True))

    @cached_property
    def _stored_offsets(self) -> torch.Tensor:
        offsets: torch.Tensor = self.column.offsets()
        return offsets


def to_jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A jagged column [B, ragged] over flat values; columns that share `offsets` are aligned for torch too."""
    lengths = offsets.diff()
    bounds: dict[str, Any] = {}
    if len(lengths):
        bounds = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}
    jagged: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, **bounds)
    return jagged


def require_columns(batch: TensorDict, names: Sequence[str]) -> None:
    """Refuses a batch without these columns.

    Raises:
        BatchError: naming what is missing and what is there; for what is not a batch.
    """
    from tensordict import TensorDictBase

    _check.kind("batch", batch, TensorDictBase, f"a TensorDict with the columns {list(names)}")
    present = set(map(str, batch.keys()))
    if missing := [name for name in names if name not in present]:
        raise BatchError(f"the batch lacks the columns {missing}; it has {sorted(present)}")


def read_ids(batch: TensorDict, name: str, vocab_size: int | None = None) -> Ragged:
    """The rows of a column of token ids.

    Args:
        batch: has the column.
        name: of the column.
        vocab_size: ids are below it; None where nobody knows.

    Raises:
        BatchError: for a column that is padded or holds no ids, or an id outside the vocabulary, naming its row.
    """
    column = batch[name]
    if not isinstance(column, torch.Tensor) or not column.is_nested or column.layout != torch.jagged:
        what = repr(column)
        if isinstance(column, torch.Tensor):
            what = f"nested in {column.layout}" if column.is_nested else f"of shape {tuple(column.shape)}"
        raise BatchError(
            f"the column {show(name)} is {what}, not jagged. Use rows without padding, "
            "torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )
    if column.dtype not in (torch.int64, torch.int32):
        raise BatchError(f"the column {show(name)} is of {column.dtype}. Use token ids of torch.int64")
    ids = Ragged(column)
    if ids.values.dim() != 1:
        raise BatchError(
            f"the column {show(name)} has {ids.values.dim() + 1} dimensions. Use one token id after the other"
        )
    if vocab_size is not None and ((ids.values < 0) | (ids.values >= vocab_size)).any():
        _refuse_strangers(ids, name, vocab_size)
    return ids


def read_candidates(batch: TensorDict, lengths: torch.Tensor) -> Ragged:
    """The rows of `candidate_ids`, [tokens, k] each.

    Args:
        batch: has the column.
        lengths: int64 [B], response tokens of each row.

    Raises:
        BatchError: for a column that does not hold k token ids for each response token.
    """
    require_columns(batch, ("candidate_ids",))
    column = batch["candidate_ids"]
    wanted = "Use k token ids for each response token, jagged [B, tokens, k]"
    if not isinstance(column, torch.Tensor) or not column.is_nested or column.layout != torch.jagged:
        raise BatchError(f"the column 'candidate_ids' is a {type(column).__name__} that is not jagged. {wanted}")
    ids = Ragged(column)
    if ids.values.dim() != 2 or ids.values.dtype not in (torch.int64, torch.int32):
        shape = f"{ids.values.dtype} of {ids.values.dim() + 1} dimensions"
        raise BatchError(f"the column 'candidate_ids' is of {shape}. {wanted}")
    if differing := (ids.lengths != lengths).nonzero().flatten().tolist():
        row = differing[0]
        raise BatchError(
            f"row {row} of 'candidate_ids' has {int(ids.lengths[row])} tokens, its response {int(lengths[row])}. "
            f"{wanted}"
        )
    if (ids.packed < 0).any():
        raise BatchError(f"the column 'candidate_ids' holds {int(ids.packed.min())}, which is not a token id. {wanted}")
    return ids


def _refuse_strangers(ids: Ragged, name: str, vocab_size: int) -> None:
    """Checks each row by itself: values between the rows belong to no row."""
    for row, (start, length) in enumerate(zip(ids.starts.tolist(), ids.lengths.tolist(), strict=True)):
        values = ids.values[start : start + length]
        strangers = values[(values < 0) | (values >= vocab_size)]
        if len(strangers):
            raise BatchError(
                f"row {row} of {show(name)} holds the token id {int(strangers[0])}, the model's are 0 to "
                f"{vocab_size - 1}. Use the model's own tokenizer"
            )
