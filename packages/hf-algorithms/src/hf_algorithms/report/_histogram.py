"""Counts of a number's values, as bars that a reader can choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from hf_protocols.drawing import format_number

__all__ = ["Bin", "compute_bins", "render_histogram"]

_MOST_BINS = 12
_HEIGHT = 64.0


class Bin(NamedTuple):
    """Values from `low` to `high`; `high` itself belongs to the next bin, except in the last one."""

    low: float
    high: float
    num_values: int
    is_last: bool

    def holds(self, value: float | None) -> bool:
        """Returns True if the value lies in the bin."""
        return value is not None and (self.low <= value < self.high or (self.is_last and value == self.high))

    @property
    def label(self) -> str:
        """The value, or the range."""
        if self.low == self.high:
            return format_number(self.low)
        return f"{format_number(self.low)} to {format_number(self.high)}"


def compute_bins(values: Sequence[float]) -> list[Bin]:
    """Returns the bins of finite values: one for each value where there are few, else of equal width."""
    distinct = sorted(set(values))
    if len(distinct) <= _MOST_BINS:
        return [Bin(value, value, values.count(value), is_last=True) for value in distinct]
    low, high = distinct[0], distinct[-1]
    width = (high - low) / _MOST_BINS
    if not (width > 0 and math.isfinite(width)):
        return [Bin(low, high, len(values), is_last=True)]
    edges = [low + number * width for number in range(_MOST_BINS)] + [high]
    empty = [Bin(edges[n], edges[n + 1], 0, is_last=n == _MOST_BINS - 1) for n in range(_MOST_BINS)]
    return [each._replace(num_values=sum(map(each.holds, values))) for each in empty]


def render_histogram(bins: Sequence[Bin], *, name: str, chosen: int | None) -> str:
    """Returns one button a bin, which chooses it; the chosen one takes the choice back.

    Args:
        bins: at least one.
        name: what is counted.
        chosen: number of a bin, or None.
    """
    most = max(each.num_values for each in bins) or 1
    bars = []
    for number, each in enumerate(bins):
        height = _HEIGHT * each.num_values / most
        is_chosen = number == chosen
        hint = f"{name} {each.label}: {each.num_values} responses"
        bars.append(
            f'<button class="bin" data-set="bin={"" if is_chosen else number}" '
            f'aria-pressed="{"true" if is_chosen else "false"}" title="{escape(hint)}" aria-label="{escape(hint)}">'
            f'<svg viewBox="0 0 10 {_HEIGHT:g}" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect x="0" width="10" y="{_HEIGHT - height:.1f}" height="{height:.1f}"/></svg>'
            f"<b>{each.num_values}</b><small>{each.label}</small></button>"
        )
    return f'<div class="histogram" role="group" aria-label="{escape(name)}">{"".join(bars)}</div>'
