"""Unknown names, answered with the nearest known ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hf_protocols.errors import ConfigError

__all__ = ["unknown_name"]


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error to raise for ``name``, which is none of ``known``; ``what`` says what it should have named."""
    names, lowered = sorted(known), name.lower()
    begun = [candidate for candidate in names if lowered and candidate.startswith(lowered)]
    near = list(dict.fromkeys(begun + difflib.get_close_matches(lowered, names, n=3, cutoff=0.4)))[:3]
    if near:
        return ConfigError(f"{what} {name!r} is unknown; nearest: {', '.join(near)}")
    return ConfigError(f"{what} {name!r} is unknown; known: {', '.join(names) or 'none'}")
