"""One score of a response from those of several functions and models. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from hf_protocols.errors import BatchError

if TYPE_CHECKING:
    import torch

__all__ = ["combine_scores"]


def combine_scores(parts: Mapping[str, tuple[float, torch.Tensor]], *, required: Collection[str] = ()) -> torch.Tensor:
    """Returns the weighted sum of scores, float64 [B].

    A part that is NaN does not apply to the response, like None in TRL: the sum is over the other parts. A response
    has no score (NaN) if all parts with a weight other than 0 are NaN, or if a `required` part is NaN.

    Args:
        parts: weight and scores [B] by name.
        required: names of the parts without which a response has no score.

    Raises:
        BatchError: for no parts, or parts of different lengths.
    """
    import torch

    lengths = {name: len(scores) for name, (_, scores) in parts.items()}
    if len(set(lengths.values())) != 1:
        raise BatchError(f"scores of {lengths or 'no parts'}: a weighted sum needs the same number of each")
    total = torch.zeros(next(iter(lengths.values())), dtype=torch.float64)
    is_scored = torch.zeros(len(total), dtype=torch.bool)
    is_refused = torch.zeros(len(total), dtype=torch.bool)
    for name, (weight, scores) in parts.items():
        if weight:
            total += weight * scores.double().nan_to_num(nan=0.0)
            is_scored |= ~scores.isnan()
        if name in required:
            is_refused |= scores.isnan()
    return total.masked_fill(~is_scored | is_refused, torch.nan)
