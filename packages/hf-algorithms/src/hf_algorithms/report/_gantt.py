"""One iteration as a Gantt chart: a row per rank, a bar per call, a thin bar below it per part of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from hf_algorithms.report._breakdown import measure_union
from hf_algorithms.report._numbers import format_bytes, format_milliseconds, round_ticks
from hf_algorithms.report._timeline import Call, Part, Row, Timeline

__all__ = ["choose_colours", "render_gantt"]

# Bars are placed in percent, so that the chart takes the width of the page and its text keeps its size.
_ROW_PX, _BAR_PX, _PART_PX = 36, 20, 5
_NUM_COLOURS = 8
# A bar narrower than this share of the chart has no room for its name; its number in the table has.
_SMALLEST_LABELLED = 0.012


def render_gantt(timeline: Timeline) -> str:
    """The chart, its legend, and a table of the calls with their times."""
    scale = _Scale(timeline)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(call.key for call in timeline.calls), start=1)}
    colours = choose_colours(call.role for call in timeline.calls)
    lanes = [_lane(row, timeline.calls, scale, numbers, colours) for row in timeline.rows]
    legend = "".join(f'<span class="c{colour}"><i></i>{escape(role)}</span>' for role, colour in colours.items())
    return (
        f'<div class="legend">{legend}</div><div class="gantt">{"".join(lanes)}{_axis(scale)}</div>'
        f"{_table(timeline, numbers, colours)}"
    )


class _Scale:
    """From microseconds of the trace to percent of the chart."""

    def __init__(self, timeline: Timeline) -> None:
        self.start_us = timeline.start_us
        self.span_us = max(timeline.end_us - timeline.start_us, 1.0)
        self.ticks_us = round_ticks(0.0, self.span_us, 5)

    def share(self, time_us: float) -> float:
        return (time_us - self.start_us) / self.span_us

    def placed(self, start_us: float, end_us: float) -> str:
        left, width = 100 * self.share(start_us), 100 * (end_us - start_us) / self.span_us
        return f'x="{left:.3f}%" width="{max(width, 0.08):.3f}%"'


def choose_colours(names: Iterable[str]) -> dict[str, int]:
    """A colour for each name, by the order of their first appearance."""
    return {name: number % _NUM_COLOURS for number, name in enumerate(dict.fromkeys(names))}


def _lane(
    row: Row, calls: Sequence[Call], scale: _Scale, numbers: Mapping[str, int], colours: Mapping[str, int]
) -> str:
    own = [call for call in calls if call.row == row.key]
    bars = "".join(_bar(call, scale, numbers[call.key], colours[call.role]) for call in own)
    label = f"{row.label}: " + ", ".join(call.name for call in own)
    idle = f"idle {max(0.0, 1 - measure_union(own) / scale.span_us):.0%}"
    return (
        f'<div class="lane-name">{escape(row.label)} <small>{idle}</small></div>'
        f'<svg class="lane" width="100%" height="{_ROW_PX}" role="img" aria-label="{escape(label)}">'
        f"{_grid(scale)}{bars}</svg>"
    )


def _bar(call: Call, scale: _Scale, number: int, colour: int) -> str:
    place = scale.placed(call.start_us, call.end_us)
    style = f"bar c{colour}" + (" failed" if call.failed else "")
    title = f"{call.name}: {format_milliseconds(call.end_us - call.start_us)}" + (", failed" if call.failed else "")
    text = ""
    if call.end_us - call.start_us >= _SMALLEST_LABELLED * scale.span_us:
        text = f'<svg {place} y="4" height="{_BAR_PX}"><text x="4" y="14">{number} {escape(call.method)}</text></svg>'
    parts = "".join(_part(part, call, scale, colour) for part in call.parts)
    return (
        f'<g class="{style}"><rect {place} y="4" height="{_BAR_PX}" rx="2"><title>{escape(title)}</title></rect>'
        f"{text}{parts}</g>"
    )


def _part(part: Part, call: Call, scale: _Scale, colour: int) -> str:
    title = f"{part.name} in {call.name}: {format_milliseconds(part.end_us - part.start_us)}"
    place = scale.placed(part.start_us, part.end_us)
    return f'<rect class="part" {place} y="{_BAR_PX + 6}" height="{_PART_PX}"><title>{escape(title)}</title></rect>'


def _grid(scale: _Scale) -> str:
    places = (f"{100 * tick / scale.span_us:.3f}%" for tick in scale.ticks_us)
    return "".join(f'<line class="grid" x1="{place}" x2="{place}" y1="0" y2="{_ROW_PX}"/>' for place in places)


def _axis(scale: _Scale) -> str:
    labels = []
    for tick in scale.ticks_us:
        share = tick / scale.span_us
        anchor = "start" if share < 0.05 else "end" if share > 0.9 else "middle"
        # The first label names the unit; the others are bare numbers.
        text = "0 ms" if tick == 0 else f"{tick / 1e3:g}"
        labels.append(f'<text class="tick {anchor}" x="{100 * share:.3f}%" y="13">{text}</text>')
    return f'<div></div><svg class="lane" width="100%" height="18" aria-hidden="true">{"".join(labels)}</svg>'


def _table(timeline: Timeline, numbers: Mapping[str, int], colours: Mapping[str, int]) -> str:
    by_key: dict[str, list[Call]] = {}
    for call in timeline.calls:
        by_key.setdefault(call.key, []).append(call)
    rows = "".join(
        _table_row(calls, timeline.start_us, numbers[key], colours[calls[0].role]) for key, calls in by_key.items()
    )
    return (
        '<table class="calls"><thead><tr><th>#</th><th>call</th><th class="number wide">ranks</th>'
        '<th class="number">starts</th><th class="number">takes</th><th class="number wide">reads</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _table_row(calls: Sequence[Call], start_us: float, number: int, colour: int) -> str:
    slowest = max(calls, key=lambda call: call.end_us - call.start_us)
    begins_us = min(call.start_us for call in calls) - start_us
    read = [call.bytes_read for call in calls if call.bytes_read is not None]
    parts: dict[str, float] = {}
    for part in slowest.parts:
        parts[part.name] = parts.get(part.name, 0.0) + part.end_us - part.start_us
    detail = ", ".join(f"{escape(name)} {format_milliseconds(time_us)}" for name, time_us in parts.items())
    name = f"{escape(slowest.role)}.<wbr>{escape(slowest.method)}" if "." in slowest.name else escape(slowest.name)
    return (
        f'<tr class="c{colour}"><td><i></i>{number}</td><td><code>{name}</code>'
        + (f"<small>{detail}</small>" if detail else "")
        + f'</td><td class="number wide">{len(calls)}</td><td class="number">{format_milliseconds(begins_us)}</td>'
        f'<td class="number">{format_milliseconds(slowest.end_us - slowest.start_us)}</td>'
        f'<td class="number wide">{format_bytes(sum(read)) if read else ""}</td></tr>'
    )
