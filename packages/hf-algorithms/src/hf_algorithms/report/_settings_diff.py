"""Configurations of several runs, key by key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hf_algorithms.report._files import parse_settings
from hf_protocols.drawing import Markup, render_table

__all__ = ["compare_settings", "flatten_settings", "render_comparison"]


def flatten_settings(text: str) -> dict[str, str]:
    """Returns `section.key` and value of a TOML text; empty where it cannot be read."""
    return dict(_flatten("", parse_settings(text)))


def _flatten(prefix: str, body: Mapping[str, Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in body.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            found += _flatten(f"{key}.", value)
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            for number, each in enumerate(value):
                found += _flatten(f"{key}[{number}].", each)
        else:
            found.append((key, json.dumps(value, ensure_ascii=False, default=str)))
    return found


def compare_settings(texts: Sequence[str]) -> dict[str, list[str | None]]:
    """Returns the keys whose values differ between the texts; None where a text lacks the key."""
    settings = [flatten_settings(text) for text in texts]
    keys = dict.fromkeys(key for each in settings for key in each)
    rows = {key: [each.get(key) for each in settings] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def render_comparison(rows: Mapping[str, Sequence[str | None]], names: Sequence[str], colours: Sequence[int]) -> str:
    """Returns a table with a column for each run.

    Args:
        rows: by what they compare.
        names: of the runs.
        colours: of the runs' lines.
    """
    heads = [
        Markup(f'<span class="c{colour}"><i></i>{escape(name)}</span>')
        for name, colour in zip(names, colours, strict=True)
    ]
    cells = [
        (Markup(f"<code>{escape(key)}</code>"), *("" if value is None else value for value in values))
        for key, values in rows.items()
    ]
    return f'<div class="scroll">{render_table(("", *heads), cells, style="compare")}</div>'
