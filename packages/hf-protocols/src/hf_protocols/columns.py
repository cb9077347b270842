"""Sizes of the batch columns that calls read and write, by the columns' names in the dataflow."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ColumnSize", "find_column_size"]

_INTEGER_BYTES, _FLOAT_BYTES, _MASK_BYTES = 8, 4, 1
_ONE_PER_ROW = ("row_id", "answer", "finish_reason", "weight_version", "scores", "costs")
_IDENTIFIERS = ("sample_id", "prompt_id", "group_id")
"""Columns that are not counted: they take few bytes compared with the tokens of their row."""


@dataclass(frozen=True, kw_only=True)
class ColumnSize:
    """Bytes of one row of a column."""

    row_bytes: int = 0
    """However long the row is."""
    prompt_token_bytes: int = 0
    """For each token of the prompt."""
    response_token_bytes: int = 0
    """For each token of the response."""

    def count_bytes(self, *, prompt_tokens: int, response_tokens: int) -> int:
        """Returns the bytes of a row of these lengths."""
        return self.row_bytes + self.prompt_token_bytes * prompt_tokens + self.response_token_bytes * response_tokens


def find_column_size(name: str) -> ColumnSize:
    """Returns the size of a column of `ModelCall.reads` or `writes`; a `?` at its end is ignored.

    Each token id takes 8 bytes and each mask entry 1. Columns with one figure per row (scores, row numbers) take 8
    bytes per row. Every other column, also one of an unknown name, takes 4 bytes per response token, as log-probs and
    values do. A number at the end of a name marks a column of a second generation. Ids of samples, prompts and groups
    count as 0 bytes.
    """
    name = name.removesuffix("?").rstrip("0123456789").removesuffix("_")
    if name.endswith(_ONE_PER_ROW):
        return ColumnSize(row_bytes=_INTEGER_BYTES)
    if name.endswith(_IDENTIFIERS):
        return ColumnSize()
    if name == "prompt_ids":
        return ColumnSize(prompt_token_bytes=_INTEGER_BYTES)
    if name.endswith("_ids"):
        return ColumnSize(response_token_bytes=_INTEGER_BYTES)
    return ColumnSize(response_token_bytes=_MASK_BYTES if name.endswith("_mask") else _FLOAT_BYTES)
