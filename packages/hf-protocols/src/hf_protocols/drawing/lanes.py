"""Gantt charts: a lane for each rank or model, a bar for each call, a thin bar below it for each part of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from hf_protocols.drawing.numbers import round_ticks

__all__ = ["Bar", "Lane", "choose_colours", "render_lanes", "render_legend"]

# Bars are placed in percent, so that the chart takes the width of the page and its text keeps its size.
_ROW_PX, _BAR_PX, _PART_PX = 36, 20, 5
_NUM_COLOURS = 8
_NUM_TICKS = 5
# A bar narrower than this share of the chart has no room for its name.
_SMALLEST_LABELLED = 0.012
_SMALLEST_PERCENT = 0.08


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A stretch of time, in the unit of its chart.

    Attributes:
        start: from the beginning of the chart.
        end: after `start`.
        title: shown where a reader points at the bar.
        colour: number of the palette.
        text: inside the bar, where it has room.
        is_failed: drawn with a dashed edge.
        parts: inside this stretch, drawn below it.
    """

    start: float
    end: float
    title: str
    colour: int = 0
    text: str = ""
    is_failed: bool = False
    parts: Sequence[Bar] = ()


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A row of bars.

    Attributes:
        label: in front of it.
        note: after the label, smaller.
        description: of the bars, for readers who do not see them.
        bars: in any order.
    """

    label: str
    note: str
    description: str
    bars: Sequence[Bar]


def choose_colours(names: Iterable[str]) -> dict[str, int]:
    """Returns a colour for each name, by the order of their first appearance."""
    return {name: number % _NUM_COLOURS for number, name in enumerate(dict.fromkeys(names))}


def render_legend(colours: Mapping[str, int]) -> str:
    """Returns a line of names with their colours."""
    entries = "".join(f'<span class="c{colour}"><i></i>{escape(name)}</span>' for name, colour in colours.items())
    return f'<div class="legend">{entries}</div>'


def render_lanes(lanes: Sequence[Lane], *, span: float, format_tick: Callable[[float], str]) -> str:
    """Returns the chart.

    Args:
        lanes: from the top.
        span: time of the whole width, above 0.
        format_tick: text of a time on the axis.
    """
    ticks = round_ticks(0.0, span, _NUM_TICKS)
    grid = "".join(
        f'<line class="grid" x1="{place}" x2="{place}" y1="0" y2="{_ROW_PX}"/>'
        for place in (f"{100 * tick / span:.3f}%" for tick in ticks)
    )
    rows = "".join(_render_lane(lane, span, grid) for lane in lanes)
    return f'<div class="gantt">{rows}{_render_axis(ticks, span, format_tick)}</div>'


def _render_lane(lane: Lane, span: float, grid: str) -> str:
    label = escape(f"{lane.label}: {lane.description}")
    bars = "".join(_render_bar(bar, span) for bar in lane.bars)
    return (
        f'<div class="lane-name">{escape(lane.label)} <small>{escape(lane.note)}</small></div>'
        f'<svg class="lane" width="100%" height="{_ROW_PX}" role="img" aria-label="{label}">{grid}{bars}</svg>'
    )


def _render_bar(bar: Bar, span: float) -> str:
    place = _place(bar, span)
    style = f"bar c{bar.colour}" + (" failed" if bar.is_failed else "")
    text = ""
    if bar.text and bar.end - bar.start >= _SMALLEST_LABELLED * span:
        inner = f'<text x="4" y="14">{escape(bar.text)}</text>'
        text = f'<svg {place} y="4" height="{_BAR_PX}" aria-hidden="true">{inner}</svg>'
    parts = "".join(
        f'<rect class="part" {_place(part, span)} y="{_BAR_PX + 6}" height="{_PART_PX}">'
        f"<title>{escape(part.title)}</title></rect>"
        for part in bar.parts
    )
    return (
        f'<g class="{style}"><rect {place} y="4" height="{_BAR_PX}" rx="2"><title>{escape(bar.title)}</title></rect>'
        f"{text}{parts}</g>"
    )


def _place(bar: Bar, span: float) -> str:
    width = max(100 * (bar.end - bar.start) / span, _SMALLEST_PERCENT)
    return f'x="{100 * bar.start / span:.3f}%" width="{width:.3f}%"'


def _render_axis(ticks: Sequence[float], span: float, format_tick: Callable[[float], str]) -> str:
    labels = []
    for tick in ticks:
        share = tick / span
        anchor = "start" if share < 0.05 else "end" if share > 0.9 else "middle"
        labels.append(f'<text class="tick {anchor}" x="{100 * share:.3f}%" y="13">{escape(format_tick(tick))}</text>')
    return f'<div></div><svg class="lane" width="100%" height="18" aria-hidden="true">{"".join(labels)}</svg>'
