"""JSON that a run, or an accident, wrote: texts that can be encoded, and numbers that charts can hold."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["LARGEST", "parse_json", "read_number"]

LARGEST = 1e300
"""Beyond it, sums over a run's iterations leave the range of a float; such a number is left out like NaN."""


def parse_json(text: str | bytes) -> Any:
    """Returns what the text holds; an unpaired surrogate in it, which no file or page can hold, becomes U+FFFD.

    Raises:
        ValueError: for text that is not JSON, or nests too deeply.
    """
    try:
        body = json.loads(text)
        return body if text.isascii() and not _has_surrogates(text) else _repair(body)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def read_number(value: object) -> float | None:
    """Returns a number of at most 1e300 in size as a float; None for anything else, booleans and NaN among them."""
    # a comparison with NaN is false, and booleans are not of these types
    if (type(value) is float or type(value) is int) and -LARGEST < value < LARGEST:
        return float(value)
    return None


def _has_surrogates(text: str | bytes) -> bool:
    """True if an escape in the text may be one."""
    if isinstance(text, bytes):
        return b"\\ud" in text or b"\\uD" in text
    return "\\ud" in text or "\\uD" in text


def _repair(body: Any) -> Any:
    if isinstance(body, str):
        return body if body.isascii() else body.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(body, dict):
        return {_repair(name): _repair(value) for name, value in body.items()}
    return [_repair(each) for each in body] if isinstance(body, list) else body
