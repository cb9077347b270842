"""One score of a response from those of functions and models. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["combine_scores"]


def combine_scores(parts: Mapping[str, tuple[float, torch.Tensor]]) -> torch.Tensor:
    """Returns the weighted sum of scores, float64 [B]; NaN where a part has no score.

    Args:
        parts: weight and scores [B] by name, at least one part.
    """
    import torch

    return torch.stack([weight * scores.double() for weight, scores in parts.values()]).sum(0)
