"""Base of every algorithm's section of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["AlgorithmConfig", "Coefficient", "Discount", "Range"]

_LARGEST = 1e6
"""More is a mistake, and overflows where it is squared in float32."""

Coefficient = Annotated[float, Field(ge=0, le=_LARGEST)]
Range = Annotated[float, Field(gt=0, le=_LARGEST)]
Discount = Annotated[float, Field(ge=0, le=1)]


class AlgorithmConfig(BaseModel):
    """Keys of `[algorithm]` that every algorithm has; a recipe's own configuration adds to them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    """A recipe of `RECIPES`, or the name of your own."""
    recipe: str | None = None
    """Your own recipe, as `module:RECIPE` or `file.py:RECIPE`."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the batch of one iteration."""
    mini_batches: Annotated[int, Field(ge=1)] = 1
    """Updates per pass; each takes a global, seeded share of the rows."""
