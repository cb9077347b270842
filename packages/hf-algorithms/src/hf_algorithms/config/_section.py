"""The base of sections, and kinds of keys that several of them have."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from hf_protocols.paths import expand_path

__all__ = ["Positive", "Section", "UserPath", "described"]

Positive = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
"""It fits a float32 with room for products."""
UserPath = Annotated[str, AfterValidator(expand_path)]
"""`~` is expanded; a hub name stays as it is."""


def described(rule: str) -> WrapValidator:
    """One sentence for a key that takes values of several kinds: pydantic has one for each kind that a value is not."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(rule) from None

    return WrapValidator(check)


class Section(BaseModel):
    """A table of the file: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
