"""Shares of a whole as horizontal bars."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hf_protocols.drawing.lanes import render_legend

__all__ = ["render_share", "render_stack"]

_HEIGHT = 22


def render_share(share: float, label: str) -> str:
    """Returns one bar in the colour of its place.

    Args:
        share: of the whole width; more than 1 is drawn as 1.
        label: says it.
    """
    return (
        f'<svg width="100%" height="12" role="img" aria-label="{escape(label)}">'
        f'<rect class="fill" width="{100 * min(share, 1.0):.2f}%" height="12" rx="2"/></svg>'
    )


def render_stack(parts: Sequence[tuple[str, float]]) -> str:
    """Returns one bar of several parts, with a legend that names them.

    Args:
        parts: name and share of the whole width of each, from the left.
    """
    bars, at = [], 0.0
    for number, (name, share) in enumerate(parts):
        place = f'x="{100 * at:.3f}%" width="{100 * share:.3f}%" height="{_HEIGHT}"'
        bars.append(f'<rect class="fill c{number % 8}" {place}><title>{escape(name)}</title></rect>')
        at += share
    label = escape("; ".join(name for name, _ in parts))
    return (
        f'<svg class="stack" width="100%" height="{_HEIGHT}" role="img" aria-label="{label}">'
        f'<rect class="track" width="100%" height="{_HEIGHT}"/>{"".join(bars)}</svg>'
        + render_legend({name: number % 8 for number, (name, _) in enumerate(parts)})
    )
