"""JSON as text that a file can hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

__all__ = ["format_json"]


def format_json(body: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """Returns JSON on one line with characters as they are, unless one is an unpaired surrogate: then all are escaped.

    Args:
        body: what `json.dumps` takes; columns that nothing reads may have surrogates.
        default: of `json.dumps`.
    """
    text = json.dumps(body, ensure_ascii=False, default=default)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(body, default=default)
    return text
