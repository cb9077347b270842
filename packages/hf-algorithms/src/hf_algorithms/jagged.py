"""Between jagged columns [B, ragged] and padded tensors [B, T]: only workers pad."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

__all__ = ["FlatRows", "decode_text", "encode_text", "list_rows", "pad_rows", "read_rows", "to_jagged", "unpad_rows"]


class FlatRows(NamedTuple):
    """The rows of a column as one flat tensor: row i is `values[starts[i] : starts[i] + lengths[i]]`."""

    values: torch.Tensor
    """[elements, ...]: of all rows; there may be holes between them."""
    starts: torch.Tensor
    """int64 [B]."""
    lengths: torch.Tensor
    """int64 [B]."""


def to_jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """One jagged column from the rows' tensors, each [length]."""
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def pad_rows(column: torch.Tensor) -> torch.Tensor:
    """[B, T] with T the longest row; zeros (False) beyond a row's end. A dense column is returned as it is."""
    if not column.is_nested:
        return column
    values, starts, lengths = read_rows(column)
    places = torch.arange(int(lengths.max()) if len(lengths) else 0, device=lengths.device)
    mask = places < lengths[:, None]
    padded = values.new_zeros(*mask.shape, *values.shape[1:])
    padded[mask] = values[(starts[:, None] + places)[mask]]
    return padded


def unpad_rows(padded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The rows of `padded` [B, T] cut to the lengths of the column `like`, jagged or dense."""
    longest = padded.shape[1]
    lengths = read_rows(like).lengths.clamp(max=longest)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = padded[torch.arange(longest, device=lengths.device) < lengths[:, None]]
    jagged: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return jagged


def decode_text(column: torch.Tensor) -> list[str]:
    """The texts of a jagged column of UTF-8 bytes."""
    values, starts, lengths = read_rows(column)
    flat = values.cpu().numpy().tobytes() if values.dtype == torch.uint8 else bytes(values.tolist())
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    return [flat[start : start + length].decode() for start, length in spans]


def encode_text(texts: Sequence[str]) -> torch.Tensor:
    """A jagged column of UTF-8 bytes, which `decode_text` reads."""
    rows = [text.encode() for text in texts]
    flat = bytearray(b"".join(rows))
    values = torch.frombuffer(flat, dtype=torch.uint8) if flat else torch.empty(0, dtype=torch.uint8, device="cpu")
    offsets = torch.tensor(list(accumulate(map(len, rows), initial=0)), dtype=torch.int64, device="cpu")
    column: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return column


def list_rows(column: torch.Tensor) -> list[list[Any]]:
    """The rows of a jagged column [B, ragged] as Python numbers."""
    values, starts, lengths = read_rows(column)
    flat = values.tolist()
    return [flat[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]


def read_rows(column: Any) -> FlatRows:
    """The rows of a jagged column, or of a dense one [B, T]: no tensor is made for each row."""
    if not column.is_nested:
        lengths = torch.full((len(column),), column.shape[1], device=column.device)
        return FlatRows(column.flatten(0, 1), lengths.cumsum(0) - lengths, lengths)
    offsets, lengths = column.offsets(), column.lengths()
    return FlatRows(column.values(), offsets[:-1], offsets.diff() if lengths is None else lengths)
