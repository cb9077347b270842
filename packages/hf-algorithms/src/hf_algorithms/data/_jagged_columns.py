"""Rows of different lengths as columns of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from hf_protocols.errors import BatchError

if TYPE_CHECKING:
    import torch

__all__ = ["build_jagged", "check_rows"]


def build_jagged(sequences: Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
    """A jagged nested tensor [B, ragged] of `sequences`."""
    import torch

    offsets = torch.tensor(list(accumulate(map(len, sequences), initial=0)), dtype=torch.int64, device="cpu")
    values = torch.tensor(list(chain.from_iterable(sequences)), dtype=dtype, device="cpu")
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def check_rows(indices: Iterable[int], num_rows: int) -> list[int]:
    """The numbers of rows as a list.

    Raises:
        BatchError: for a row that a data set of `num_rows` rows does not have.
    """
    chosen = [int(index) for index in indices]
    if outside := [row for row in chosen if not 0 <= row < num_rows]:
        raise BatchError(f"row {outside[0]} of a data set with {num_rows} rows, 0 to {num_rows - 1}")
    return chosen
