"""Checks of arguments: `Checks(SomeError)` raises that error with the given value and the wanted kind.

Each check returns if the value is right. Messages name the argument, show the value in at most 80 characters, and say
what to give instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import nan
from types import UnionType
from typing import Any, TypeVar, cast

from hf_protocols.errors import HybridFlowError

__all__ = ["Checks", "are_whole", "describe_names", "shorten", "shorten_list", "show"]

_Kind = TypeVar("_Kind")
_Known = TypeVar("_Known")
_Item = TypeVar("_Item")

_MOST_SHOWN = 80
_MOST_LISTED = 3
_MOST_SECONDS = 10**9


def show(value: object) -> str:
    """Returns the `repr` of any value for a message, at most 80 characters long."""
    try:
        return shorten(repr(_first_part(value)))
    except Exception:  # noqa: BLE001 - a user's class may fail in any way, and Python has no text for huge numbers
        return f"({type(value).__name__} that cannot be shown)"


def shorten(text: str, most: int = _MOST_SHOWN) -> str:
    """Returns a text for a message, truncated to 80 characters, or to `most`."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def describe_names(names: Sequence[str]) -> str:
    """Returns the first names of many for a message, and how many more there are."""
    return f"[{', '.join(shorten_list(names, show))}]"


def shorten_list(texts: Sequence[_Item], describe: Callable[[_Item], str] = str) -> list[str]:
    """Returns the first three of many texts for a message, and how many more there are; only those are described."""
    return [
        *map(describe, texts[:_MOST_LISTED]),
        *[f"and {len(texts) - _MOST_LISTED} more"] * (len(texts) > _MOST_LISTED),
    ]


def _first_part(value: object) -> object:
    """The part of a large value that is shown: the `repr` of millions of items takes seconds."""
    if type(value) in (str, bytes, list, tuple) and len(cast("str", value)) > _MOST_SHOWN:
        return cast("str", value)[: _MOST_SHOWN + 1]
    if type(value) is dict and len(value) > _MOST_SHOWN:
        return dict(islice(value.items(), _MOST_SHOWN))
    return value


def are_whole(values: object) -> bool:
    """True if `values` is a sequence of ints; bools and floats are rejected."""
    return isinstance(values, Sequence) and all(
        hasattr(each, "__index__") and not isinstance(each, bool) for each in values
    )


class Checks:
    """Checks of arguments that refuse with one class of errors.

    Args:
        error: the class; it is raised with one line of text.
    """

    def __init__(self, error: type[HybridFlowError]) -> None:
        self._error = error

    def kind(self, name: str, value: object, kind: type | UnionType, wanted: str) -> None:
        """Refuses a `value` that is not a `kind`."""
        if not isinstance(value, kind):
            raise self._error(f"{name}={show(value)}. Use {wanted}")

    def kinds(self, name: str, values: object, kind: type[_Kind], wanted: str) -> tuple[_Kind, ...]:
        """Returns the values as a tuple, or refuses them if any is not a `kind`."""
        checked = tuple(values) if isinstance(values, Iterable) else None
        if checked is None or not all(isinstance(each, kind) for each in checked):
            raise self._error(f"{name}={show(values)}. Use {wanted}")
        return checked

    def name(self, name: str, value: object) -> None:
        """Refuses a value that is not a non-empty string."""
        if not isinstance(value, str) or not value:
            raise self._error(f"{name}={show(value)}. Use a name")

    def one_of(self, name: str, value: object, known: Iterable[_Known]) -> _Known:
        """Returns the one of the `known` values that equals `value`, or refuses it; True does not equal 1 here."""
        known = tuple(known)
        for each in known:
            if isinstance(value, type(each)) and isinstance(value, bool) is isinstance(each, bool) and value == each:
                return each
        raise self._error(f"{name}={show(value)} is not one of {', '.join(map(show, known))}")

    def count(self, name: str, value: object, *, least: int = 1) -> None:
        """Refuses a value that is not an int of at least `least`; bools and floats are refused."""
        self._refuse_foreign(name, value, int, "__index__")
        if type(value) is not int or value < least:
            raise self._error(f"{name}={show(value)} must be a whole number of at least {least}")

    def columns(self, name: str, columns: object, *, may_lack: bool) -> tuple[str, ...]:
        """Returns the column names as a tuple. With `may_lack`, a name that ends in `?` is an optional column."""
        if isinstance(columns, str):
            raise self._error(f"{name}={show(columns)} is one string. Use a list of column names, [{show(columns)}]")
        names = tuple(columns) if isinstance(columns, Iterable) else None
        if names is None or not all(isinstance(each, str) for each in names):
            raise self._error(f"{name}={show(columns)}. Use a list of column names")
        marked = [] if may_lack else [each for each in names if each.endswith("?")]
        if marked:
            lacking = f"{show(marked[0])} ends in ?, which marks a column that a reader may do without"
            raise self._error(f"{name}={show(columns)}: {lacking}")
        return names

    def number(self, name: str, value: object, *, may_be_zero: bool = False) -> None:
        """Refuses a value that is not a finite number above 0, or at least 0 with `may_be_zero`."""
        self._refuse_foreign(name, value, float, "__float__")
        number: float = value if isinstance(value, int | float) and not isinstance(value, bool) else nan
        if not 0 <= number <= sys.float_info.max or (number == 0 and not may_be_zero):
            bound = "of at least" if may_be_zero else "above"
            raise self._error(f"{name}={show(value)} must be a finite number {bound} 0")

    def _refuse_foreign(self, name: str, value: object, kind: type, converts: str) -> None:
        """Refuses a number of another library, such as a tensor, which may be in range."""
        if not isinstance(value, int | float) and hasattr(type(value), converts):
            given = f"{name}={show(value)} is of type {type(value).__name__}, not {kind.__name__}"
            raise self._error(f"{given}. Use {kind.__name__}() of it")

    def seconds(self, name: str, value: object) -> None:
        """Refuses a value that is not a finite number of seconds."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_SECONDS:
            raise self._error(
                f"{name}={show(value)} must be a finite number of seconds of at least 0 and at most {_MOST_SECONDS}"
            )

    def sizes(self, num_rows: object, weights: Any = None) -> None:
        """Refuses wrong sizes before any work for each row."""
        self.count("num_rows", num_rows, least=0)
        if cast("int", num_rows) > sys.maxsize:
            raise self._error(f"num_rows={show(num_rows)} must be at most {sys.maxsize}")
        try:
            fit = weights is None or (_are_ordered(weights) and len(weights) == num_rows)
        except TypeError:
            fit = False
        if not fit:
            raise self._error(f"weights={show(weights)}. Use one finite number >= 0 for each of the {num_rows} rows")

    def weights(self, weights: Any, num_rows: int) -> None:
        """Refuses weights that are not one finite number of at least 0 for each row, or whose sum overflows."""
        most = sys.float_info.max / max(1, num_rows)
        try:
            fit = _are_ordered(weights) and len(weights) == num_rows and all(0 <= weight <= most for weight in weights)
        except (TypeError, ValueError):  # the second from arrays of several dimensions
            fit = False
        if not fit:
            raise self._error(f"weights={show(weights)}. Use one finite number >= 0 for each of the {num_rows} rows")


def _are_ordered(weights: object) -> bool:
    """True for a list, an array or a tensor; False for mappings, unordered collections and strings."""
    return hasattr(weights, "__getitem__") and not isinstance(weights, Mapping | str | bytes | bytearray)
