"""The contract of estimators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Estimator"]


class Estimator(Protocol):
    """A frozen object that travels with a call, and computes columns of a whole batch."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that it needs; one whose name ends in `?` may be absent."""

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that it returns."""

    def __call__(self, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the columns of `writes`: [B], or [B, T] and 0 where `response_mask` is False."""
