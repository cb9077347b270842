"""Names of a library that a backend uses, each imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

__all__ = ["import_name"]


def import_name(homes: Mapping[str, str], name: str, module: str) -> Any:
    """The object of that name; for the `__getattr__` of the module that holds the table.

    Args:
        homes: the module of the library in which each name is, or the package of a name that is a module.
        name: that is asked for.
        module: that has the table.

    Raises:
        AttributeError: for a name that is not in the table.
        ImportError: if the library does not have it.
    """
    if name not in homes:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home = import_module(homes[name])
    try:
        return getattr(home, name)
    except AttributeError:
        return import_module(f"{homes[name]}.{name}")
