"""JSON objects as records: numbers keep their spelling, and what JSON readers pass over in silence is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hf_protocols.errors import DataError
from hf_protocols.validation import show

__all__ = ["SpelledNumber", "describe_json_kind", "parse_object"]

_REMEDY = 'Write each row as one JSON object, such as {"prompt": "..."}'
_KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", type(None): "null"}


_MOST_DIGITS = 4000
"""Python reads no longer whole numbers from text."""


class SpelledNumber(float):
    """A number that remembers how the file spells it: `1.50` is not `1.5` for a reader of text."""

    __slots__ = ("spelling",)

    spelling: str

    def __new__(cls, value: str | float) -> SpelledNumber:
        """Reads the number; of an infinite or undefined one JSON's own word."""
        number = super().__new__(cls, value)
        number.spelling = str(value)
        return number


def parse_object(line: bytes, *, where: str) -> Mapping[str, Any]:
    """Returns the JSON object of a line.

    Args:
        line: UTF-8; a byte order mark is not part of the data, wherever files were joined.
        where: file and line, for messages.

    Raises:
        DataError: for a line that is not one JSON object, has a key twice or a number outside the range of a float.
    """
    try:
        record = _DECODER.decode(line.decode("utf-8-sig"))
    except _UnusableError as error:
        raise DataError(f"{where}: {error}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8: byte {error.start + 1} of the line is {line[error.start]:#04x}. Save it as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise DataError(
            f"{where} is not JSON: {reason} at column {error.colno}: {_excerpt(line)}. {_REMEDY}"
        ) from error
    except RecursionError as error:
        raise DataError(
            f"{where} nests too deeply: {_excerpt(line)}. Remove what is nested, or write it as text"
        ) from error
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}: {_excerpt(line)}. {_REMEDY}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is a JSON {describe_json_kind(record)}, not an object: {_excerpt(line)}. {_REMEDY}")
    return record


def describe_json_kind(value: object) -> str:
    """Returns JSON's word for the kind of a value."""
    if isinstance(value, SpelledNumber):
        return "number"
    return _KINDS.get(type(value), "object")


class _UnusableError(Exception):
    """JSON that can be read, with content that has no single meaning."""


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _UnusableError(f"the key {show(twice)} stands twice in one object. Remove one of the two")
    return found


def _parse_fraction(text: str) -> SpelledNumber:
    number = SpelledNumber(text)
    if abs(number) == float("inf"):
        raise _UnusableError(f"the number {show(text)[1:-1]} is outside the range of a float. Write it as a string")
    return number


def _parse_whole(text: str) -> int | SpelledNumber:
    if len(text) > _MOST_DIGITS:
        raise _UnusableError(f"the number {text[:20]}... has {len(text)} characters. Write it as a string")
    return int(text) if text != "-0" else SpelledNumber(text)


def _parse_constant(name: str) -> SpelledNumber:
    number = SpelledNumber(name)
    number.spelling = name
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_object,
    parse_float=_parse_fraction,
    parse_int=_parse_whole,
    parse_constant=_parse_constant,
)


def _excerpt(line: bytes) -> str:
    return show(line.decode("utf-8", errors="replace").strip())
