"""Pydantic's problems as messages for the author of a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hf_protocols.validation import shorten, show

__all__ = ["describe_problem"]

_RULES = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be a table",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "int_type": "must be a whole number",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_type": "must be a table",
    "string_pattern_mismatch": "must consist of letters, digits, hyphens, dots and underscores",
    "string_too_short": "must not be empty",
    "string_type": "must be a string, in quotes",
    "string_unicode": "contains an unpaired surrogate, which is not a character. Remove it",
    "too_long": "must have at most {max_length} items",
    "too_short": "must have at least {min_length} items",
    "tuple_type": "must be a list",
    "union_tag_invalid": "must have one of {expected_tags} as its {discriminator}",
    "union_tag_not_found": "must have the key {discriminator}",
}
"""By pydantic's name of the error; what is in braces stands in the error's context."""


_EXAMPLES = {"dict_type": '{name = "text"}', "list_type": '["text"]', "tuple_type": '["text"]'}
"""Of values that are often written as a text, since `--set` takes what is not TOML for one."""

_MISSING = {"data": "data.train"}
"""Of sections that must be written, the key for which they must."""


def describe_problem(problem: Mapping[str, Any]) -> str:
    """Returns one line: the key, the value given and the rule that it breaks."""
    key, kind = shorten(_write_key(problem["loc"])), problem["type"]
    if kind == "missing":
        return f"{_MISSING.get(key, key)} is missing. Set it in the configuration"
    if kind == "extra_forbidden":
        return f"unknown key {show(key)}"
    if kind == "value_error" and problem["input"] and isinstance(problem["input"], list | tuple | dict):
        rule = problem["msg"].removeprefix("Value error, ")
        return f"{key}.{rule}" if re.match(r"\w+ = ", rule) else f"{key}: {rule}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "must")
    rule = _RULES[kind].format_map(problem.get("ctx", {})) if kind in _RULES else message
    value = problem["input"]
    if isinstance(value, str) and kind in _EXAMPLES:
        rule += f". Write it as {_EXAMPLES[kind]}"
    return f"{key} = {str(value).lower() if isinstance(value, bool) else show(value)}: {rule}"


def _write_key(place: Iterable[str | int]) -> str:
    """The key as users write it; a number is that of an item, as in `reward.functions[0].name`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
