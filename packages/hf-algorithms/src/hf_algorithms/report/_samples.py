"""Responses of the model before and after the run, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import zip_longest
from typing import Any

from hf_protocols.drawing import format_number

__all__ = ["render_samples"]

Sample = Mapping[str, Any]

_MOMENTS = ("before", "after")


def render_samples(samples: Mapping[str, Sequence[Sample]]) -> str:
    """One card per prompt, with its answer and the response at each moment."""
    pairs = zip_longest(*(samples.get(moment, ()) for moment in _MOMENTS))
    return f'<div class="samples">{"".join(_card(pair) for pair in pairs)}</div>'


def _card(pair: Sequence[Sample | None]) -> str:
    known = [sample for sample in pair if sample is not None]
    # Long texts get the width of the page, short ones share a line.
    size = max(len(str(sample.get(name, ""))) for sample in known for name in ("prompt", "answer", "response"))
    responses = "".join(
        _response(moment, sample) for moment, sample in zip(_MOMENTS, pair, strict=True) if sample is not None
    )
    return (
        f'<article class="{"long" if size > 60 else "short"}"><div class="task">'
        f'<pre class="prompt">{_text(known[0], "prompt")}</pre>'
        f"<pre><b>answer</b>{_text(known[0], 'answer')}</pre></div>"
        f'<div class="responses">{responses}</div></article>'
    )


def _response(moment: str, sample: Sample) -> str:
    score = sample.get("score")
    mark = ""
    if isinstance(score, (int, float)):
        style, symbol = ("right", "&#10003;") if score >= 1 else ("wrong", "&#10007;")
        mark = f'<span class="{style}">{symbol} {format_number(float(score))}</span>'
    extra = sample.get("extra")
    columns = "".join(
        f"<pre><b>{escape(str(name))}</b> {escape(str(value))}</pre>"
        for name, value in (extra.items() if isinstance(extra, Mapping) else ())
    )
    return f"<div><h4>{moment} {mark}</h4><pre>{_text(sample, 'response') or '<i>nothing</i>'}</pre>{columns}</div>"


def _text(sample: Sample, name: str) -> str:
    return escape(str(sample.get(name, "")))
