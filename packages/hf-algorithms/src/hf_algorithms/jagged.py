"""Between jagged columns [B, ragged] and padded tensors [B, T]: only workers pad."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["decode_text", "encode_text", "pad_rows", "to_jagged", "unpad_rows"]


def to_jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """One jagged column from the rows' tensors, each [length]."""
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def pad_rows(column: torch.Tensor) -> torch.Tensor:
    """[B, T] with T the longest row; zeros (False) beyond a row's end. A dense column is returned as it is."""
    if not column.is_nested:
        return column
    return torch.nn.utils.rnn.pad_sequence(list(column.unbind()), batch_first=True)


def unpad_rows(padded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The rows of ``padded`` [B, T] cut to the lengths of the jagged column ``like``."""
    return to_jagged([row[: len(shape)] for row, shape in zip(padded, like.unbind(), strict=True)])


def decode_text(column: torch.Tensor) -> list[str]:
    """The texts of a jagged column of UTF-8 bytes."""
    return [bytes(row.tolist()).decode("utf-8") for row in column.unbind()]


def encode_text(texts: Sequence[str]) -> torch.Tensor:
    """A jagged column of UTF-8 bytes, which `decode_text` reads."""
    return to_jagged([torch.tensor(list(text.encode()), dtype=torch.uint8) for text in texts])
