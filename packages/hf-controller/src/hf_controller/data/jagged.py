"""Jagged columns as torch computes with them."""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch

__all__ = ["JaggedShape", "JaggedShapes", "compute_offsets"]


class JaggedShape(NamedTuple):
    """Starts of each row's tokens, int64 [rows + 1], and the lengths of the shortest and the longest row."""

    offsets: torch.Tensor
    shortest: int
    longest: int

    def fill(self, values: torch.Tensor) -> torch.Tensor:
        """Flat values [all tokens, *row_shape] as a jagged [rows, tokens, *row_shape], without a copy."""
        _spend_warning()
        # Without these two, padding makes every row as long as all of them together.
        return torch.nested.nested_tensor_from_jagged(
            values, self.offsets, min_seqlen=self.shortest, max_seqlen=self.longest
        )


class JaggedShapes:
    """The shapes of one reader's columns, one for all columns of equal lengths: torch adds and multiplies two jagged
    tensors only where they have the same offsets tensor.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, JaggedShape] = {}

    def of(self, lengths: torch.Tensor) -> JaggedShape:
        """The shape of rows of `lengths`, int32 [rows]."""
        key = lengths.numpy().tobytes()
        if key not in self._known:
            shortest, longest = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
            self._known[key] = JaggedShape(compute_offsets(lengths), shortest, longest)
        return self._known[key]


def compute_offsets(lengths: torch.Tensor) -> torch.Tensor:
    """int64 [rows + 1], where each row's tokens start."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


@cache
def _spend_warning() -> None:
    """Makes the first jagged tensor quietly: torch logs a warning for its own developers once per process."""
    logger = logging.getLogger("torch.fx._symbolic_trace")
    level = logger.level
    logger.setLevel(logging.ERROR)
    torch.nested.nested_tensor_from_jagged(torch.zeros(1, device="cpu"), torch.tensor([0, 1], device="cpu"))
    logger.setLevel(level)
