"""Functions that a program passed and that cannot be pickled: this process holds them, and a configuration names them.

`hf_algorithms.held_functions:NAME` is found here like a function of any module, by this program alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["find_held", "find_lost", "hold", "hold_again", "release"]

_HELD: dict[str, Callable[..., Any]] = {}


def __getattr__(name: str) -> Any:
    if name not in _HELD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _HELD[name]


def hold(function: Callable[..., Any], stem: str) -> str:
    """Returns the reference of a function that is held from now on; its name begins with `stem`."""
    number = 0
    while (name := f"{stem}_{number}") in _HELD:
        number += 1
    _HELD[name] = function
    return f"{__name__}:{name}"


def hold_again(reference: str, function: Callable[..., Any]) -> None:
    """Holds a function by the reference that an earlier program had for it."""
    _HELD[reference.partition(":")[2]] = function


def release(reference: str) -> None:
    """Lets go of a function."""
    del _HELD[reference.partition(":")[2]]


def find_held(sections: Mapping[str, Any]) -> dict[str, str]:
    """Returns the references in a configuration, by key, of functions that a program holds or held."""
    return dict(_flatten(sections, ""))


def find_lost(sections: Mapping[str, Any]) -> dict[str, str]:
    """Returns those of functions that another program held."""
    return {key: value for key, value in find_held(sections).items() if value.partition(":")[2] not in _HELD}


def _flatten(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields the key and value of each reference."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _flatten(each, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _flatten(each, f"{key}[{number}]")
    elif isinstance(value, str) and value.startswith(f"{__name__}:"):
        yield key, value
