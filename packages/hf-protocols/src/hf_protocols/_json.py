"""Reads JSON with one error for invalid text and for values that no reader can hold."""

from __future__ import annotations

import json
from typing import Any

from hf_protocols.errors import HybridFlowError

__all__ = ["parse_json"]


def parse_json(error: type[HybridFlowError], wrong: str, text: str | bytes, **hooks: Any) -> Any:
    """Returns the value in a JSON text, or raises `error` with a message that starts with `wrong`."""
    try:
        return json.loads(text, **hooks)
    except HybridFlowError:
        raise
    except RecursionError:
        raise error(f"{wrong}: it nests too deeply") from None
    except ValueError as reason:  # no JSON, no UTF-8, or an integer of thousands of digits
        raise error(f"{wrong}: {reason}") from None
