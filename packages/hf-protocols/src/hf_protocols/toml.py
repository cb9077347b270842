"""TOML: one reader of files and values, and one writer of values that the reader gives back as they were."""

from __future__ import annotations

import datetime
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_protocols.errors import ConfigError
from hf_protocols.paths import read_text
from hf_protocols.validation import shorten

__all__ = ["find_unwritable", "format_toml_value", "parse_toml", "read_toml"]

_MOST_LEVELS = 32
"""Of tables and lists in each other; readers of other languages end at some depth too."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPED = re.compile(r'[\x00-\x1f"\\\x7f]')
_MOST_INTEGER = 10**4000
"""Python reads no integer of more than 4,300 digits."""
_DATES = (datetime.date, datetime.time)


def read_toml(path: Path, what: str = "the configuration") -> dict[str, Any]:
    """Returns the tables of a TOML file.

    Raises:
        ConfigError: in one line, for a file that cannot be read, is not UTF-8 or is not TOML.
    """
    try:
        return parse_toml(read_text(path, what, "a TOML file"), str(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_describe(error, path)) from None


def _describe(error: tomllib.TOMLDecodeError, path: Path) -> str:
    if (line := re.search(r"at line (\d+)", str(error))) and "Cannot overwrite a value" in str(error):
        return f"{path}, line {line[1]}: its key stands twice in one table. Remove one of the two"
    if line and (table := re.search(r"Cannot declare \((.+?),?\) twice", str(error))):
        name = ".".join(re.findall(r"'([^']*)'", table[1]))
        return f"{path}, line {line[1]}: the table [{name}] stands twice. Join the two"
    return f"{path} is not valid TOML: {shorten(str(error))}"


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Returns the tables of a TOML text; `where` names its place in a message.

    Raises:
        TOMLDecodeError: for a text that is not TOML.
        ConfigError: for one that nests too deeply or has a number of thousands of digits.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ConfigError(f"{where} is not usable TOML: its tables or lists nest too deeply. Flatten them") from None
    except ValueError:  # Python bounds the digits of an integer
        raise ConfigError(f"{where} is not usable TOML: a number has thousands of digits. Shorten it") from None


def format_toml_value(value: Any) -> str:
    """Returns a value as TOML, tables inline; one in which `find_unwritable` finds nothing reads back as it is."""
    if isinstance(value, Mapping):
        items = [f"{_format_key(key)} = {format_toml_value(each)}" for key, each in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_toml_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{_ESCAPED.sub(_escape, value)}"'
    if isinstance(value, _DATES):
        return value.isoformat()
    return float.__repr__(value) if isinstance(value, float) else int.__repr__(value)  # not a subclass's own


def find_unwritable(tables: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """Finds the first value that TOML does not give back as it is; a tuple comes back as a list.

    Returns:
        dotted key, value and reason; None if there is no such value.
    """
    left: list[tuple[str, Any, int]] = [("", tables, 0)]
    while left:
        where, value, level = left.pop()
        reason = _find_reason(value, level)
        if reason:
            return where, value, reason
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str) or _find_reason(key, 0):
                    return where, key, "is not a key of TOML, which is a string of whole characters"
            prefix = where and f"{where}."
            left += [(f"{prefix}{key}", each, level + 1) for key, each in reversed([*value.items()])]
        elif isinstance(value, list | tuple):
            left += [(f"{where}[{index}]", each, level + 1) for index, each in reversed([*enumerate(value)])]
    return None


def _find_reason(value: Any, level: int) -> str:
    if level > _MOST_LEVELS:
        return f"tables and lists nest deeper than {_MOST_LEVELS} levels. Flatten them"
    if isinstance(value, str):
        is_whole = not any("\ud800" <= letter <= "\udfff" for letter in value)
        return "" if is_whole else "contains an unpaired surrogate, which is not a character. Remove it"
    if isinstance(value, float):
        return "" if math.isfinite(value) else "is not a finite number. Use one that is"
    if isinstance(value, int):
        return "" if abs(value) < _MOST_INTEGER else "has thousands of digits. Give a smaller number"
    if isinstance(value, _DATES):
        return "" if _has_plain_offset(value) else "has a time zone that TOML cannot write. Give the time in UTC"
    if isinstance(value, Mapping | list | tuple):
        return ""
    return f"is of type {type(value).__name__}, which TOML does not have. Give a string, number, list or table"


def _has_plain_offset(value: datetime.date | datetime.time) -> bool:
    zone = getattr(value, "tzinfo", None)
    if zone is None or not isinstance(value, datetime.datetime):
        return zone is None
    offset = value.utcoffset()
    return offset is not None and not offset % datetime.timedelta(minutes=1)


def _format_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else format_toml_value(key)


def _escape(match: re.Match[str]) -> str:
    letter = match.group()
    return f"\\{letter}" if letter in '"\\' else f"\\u{ord(letter):04x}"
