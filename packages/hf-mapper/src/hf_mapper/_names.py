"""Unknown names, answered with the nearest known ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hf_protocols.errors import ConfigError

__all__ = ["unknown_name"]


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error to raise for ``name``, which is none of ``known``; ``what`` says what it should have named."""
    names = sorted(known)
    lowered = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.4)
    if near:
        return ConfigError(f"{what} {name!r} is unknown; nearest: {', '.join(lowered[match] for match in near)}")
    return ConfigError(f"{what} {name!r} is unknown; known: {', '.join(names) or 'none'}")
