"""What every section of a configuration is, and a key that holds a path."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from hf_protocols.paths import expand_path

__all__ = ["Section", "UserPath"]

UserPath = Annotated[str, AfterValidator(expand_path)]
"""`~` is expanded; a hub name stays as it is."""


class Section(BaseModel):
    """Keys that are known, of their own kind, and never changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
