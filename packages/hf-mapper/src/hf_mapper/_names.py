"""Unknown names, answered with the nearest known ones."""

from __future__ import annotations

from collections.abc import Iterable

from hf_protocols.errors import ConfigError
from hf_protocols.similar_names import describe_choices
from hf_protocols.validation import show

__all__ = ["unknown_name"]


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error to raise for `name`, which is none of `known`; `what` says what it should have named."""
    return ConfigError(f"{what} {show(name)} is unknown. {describe_choices(name, sorted(known))}")
