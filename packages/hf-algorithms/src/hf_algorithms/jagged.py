"""Between jagged columns [B, ragged] and padded tensors [B, T]: only workers pad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["decode_text", "encode_text", "list_rows", "pad_rows", "to_jagged", "unpad_rows"]


def to_jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """One jagged column from the rows' tensors, each [length]."""
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def pad_rows(column: torch.Tensor) -> torch.Tensor:
    """[B, T] with T the longest row; zeros (False) beyond a row's end. A dense column is returned as it is."""
    if not column.is_nested:
        return column
    values, starts, lengths = _read_rows(column)
    places = torch.arange(int(lengths.max()) if len(lengths) else 0, device=lengths.device)
    mask = places < lengths[:, None]
    padded = values.new_zeros(*mask.shape, *values.shape[1:])
    padded[mask] = values[(starts[:, None] + places)[mask]]
    return padded


def unpad_rows(padded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The rows of `padded` [B, T] cut to the lengths of the column `like`, jagged or dense."""
    longest = padded.shape[1]
    lengths = _read_rows(like)[2] if like.is_nested else torch.full((len(like),), like.shape[1], device=like.device)
    lengths = lengths.clamp(max=longest)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = padded[torch.arange(longest, device=lengths.device) < lengths[:, None]]
    jagged: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return jagged


def decode_text(column: torch.Tensor) -> list[str]:
    """The texts of a jagged column of UTF-8 bytes."""
    return [bytes(row).decode("utf-8") for row in list_rows(column)]


def encode_text(texts: Sequence[str]) -> torch.Tensor:
    """A jagged column of UTF-8 bytes, which `decode_text` reads."""
    return to_jagged([torch.tensor(list(text.encode()), dtype=torch.uint8) for text in texts])


def list_rows(column: torch.Tensor) -> list[list[Any]]:
    """The rows of a jagged column [B, ragged] as Python numbers."""
    values, starts, lengths = _read_rows(column)
    flat = values.tolist()
    return [flat[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]


def _read_rows(column: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flat values, and first value and length of every row: no tensor is made for each row."""
    offsets, lengths = column.offsets(), column.lengths()
    return column.values(), offsets[:-1], offsets.diff() if lengths is None else lengths
