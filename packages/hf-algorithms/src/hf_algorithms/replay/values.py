"""Arguments as JSON and back: plain values, lists, mappings, our dataclasses, and functions by their names."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hf_protocols import DataError

__all__ = ["ReplayError", "decode_value", "encode_value"]

_OURS = ("hf_protocols", "hf_engine", "hf_algorithms")


class ReplayError(DataError):
    """A recorded call that is absent, damaged, or cannot be run again."""


def encode_value(value: Any) -> Any:
    """Returns the value as JSON; of what has no form there, the name of its class."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [encode_value(each) for each in value]}
    if isinstance(value, Mapping):
        return {"dict": {str(name): encode_value(each) for name, each in value.items()}}
    if is_dataclass(value) and not isinstance(value, type):
        kept = {each.name: encode_value(getattr(value, each.name)) for each in fields(value) if each.init}
        return {"dataclass": _name(type(value)), "fields": kept}
    if inspect.isfunction(value) and "<" not in value.__qualname__:
        return {"function": _name(value)}
    return {"unrecorded": type(value).__qualname__}


def decode_value(body: Any, label: str) -> Any:
    """Returns the value of a JSON form.

    Classes and functions of a user's own are found if their module is imported already, as that of a recipe is.

    Args:
        body: from `encode_value`.
        label: beginning of messages.

    Raises:
        ReplayError: for a value that was not recorded, or whose class or function is not there.
    """
    if not isinstance(body, Mapping):
        return body
    match dict(body):
        case {"float": text}:
            return float(text)
        case {"list": parts}:
            return [decode_value(each, label) for each in parts]
        case {"tuple": parts}:
            return tuple(decode_value(each, label) for each in parts)
        case {"dict": parts}:
            return {name: decode_value(each, f"{label}.{name}") for name, each in parts.items()}
        case {"dataclass": name, "fields": parts}:
            kind = _find(name, label)
            if not (isinstance(kind, type) and is_dataclass(kind)):
                raise ReplayError(f"{label}: {name} is not a dataclass. Replay the call with the code that recorded it")
            return kind(**{key: decode_value(each, f"{label}.{key}") for key, each in parts.items()})
        case {"function": name}:
            function = _find(name, label)
            if not inspect.isfunction(function):
                raise ReplayError(f"{label}: {name} is not a function. Replay the call with the code that recorded it")
            return function
        case {"unrecorded": name}:
            raise ReplayError(
                f"{label}: an object of {name} was not recorded. Use a dataclass, or a function of a module"
            )
    raise ReplayError(f"{label}: is not a recorded value")


def _name(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _find(name: str, label: str) -> Any:
    place, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(place) if place.partition(".")[0] in _OURS else sys.modules[place]
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, KeyError, AttributeError):
        raise ReplayError(f"{label}: {name} is not there. Replay the call with the code that recorded it") from None
    return found
