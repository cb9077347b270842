"""One iteration as a Gantt chart: a row per rank, a bar per call, a thin bar below it per part of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from hf_algorithms.report._breakdown import measure_union
from hf_algorithms.report._timeline import Timeline, TimelineCall, TimelineRow
from hf_protocols.drawing import (
    Bar,
    Lane,
    Markup,
    choose_colours,
    format_bytes,
    format_milliseconds,
    render_lanes,
    render_legend,
    render_table,
)

__all__ = ["render_gantt"]


def render_gantt(timeline: Timeline) -> str:
    """Returns the chart, its legend, and a table of the calls with their times."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(call.key for call in timeline.calls), start=1)}
    colours = choose_colours(call.role for call in timeline.calls)
    span_us = max(timeline.end_us - timeline.start_us, 1.0)
    lanes = [_build_lane(row, timeline, span_us, numbers, colours) for row in timeline.rows]
    chart = render_lanes(lanes, span=span_us, format_tick=_format_tick)
    return render_legend(colours) + chart + _table(timeline, numbers, colours)


def _format_tick(time_us: float) -> str:
    """The first label names the unit; the others are bare numbers."""
    return "0 ms" if time_us == 0 else f"{time_us / 1e3:g}"


def _build_lane(
    row: TimelineRow, timeline: Timeline, span_us: float, numbers: Mapping[str, int], colours: Mapping[str, int]
) -> Lane:
    own = [call for call in timeline.calls if call.row == row.key]
    return Lane(
        label=row.label,
        note=f"idle {max(0.0, 1 - measure_union(own) / span_us):.0%}",
        description=", ".join(call.name for call in own),
        bars=[_build_bar(call, timeline.start_us, numbers[call.key], colours[call.role]) for call in own],
    )


def _build_bar(call: TimelineCall, start_us: float, number: int, colour: int) -> Bar:
    length = format_milliseconds(call.end_us - call.start_us)
    parts = [
        Bar(
            start=part.start_us - start_us,
            end=part.end_us - start_us,
            title=f"{part.name} in {call.name}: {format_milliseconds(part.end_us - part.start_us)}",
        )
        for part in call.parts
    ]
    return Bar(
        start=call.start_us - start_us,
        end=call.end_us - start_us,
        title=f"{call.name}: {length}" + (", failed" if call.failed else ""),
        colour=colour,
        text=f"{number} {call.method}",
        is_failed=call.failed,
        parts=parts,
    )


def _table(timeline: Timeline, numbers: Mapping[str, int], colours: Mapping[str, int]) -> str:
    by_key: dict[str, list[TimelineCall]] = {}
    for call in timeline.calls:
        by_key.setdefault(call.key, []).append(call)
    return render_table(
        ("#", "call", "ranks", "starts", "takes", "reads"),
        [_list_cells(calls, timeline.start_us, numbers[key]) for key, calls in by_key.items()],
        numbers=(2, 3, 4, 5),
        wide=(2, 5),
        style="calls",
        row_styles=[f"c{colours[calls[0].role]}" for calls in by_key.values()],
    )


def _list_cells(calls: Sequence[TimelineCall], start_us: float, number: int) -> tuple[object, ...]:
    slowest = max(calls, key=lambda call: call.end_us - call.start_us)
    begins_us = min(call.start_us for call in calls) - start_us
    read = [call.bytes_read for call in calls if call.bytes_read is not None]
    parts: dict[str, float] = {}
    for part in slowest.parts:
        parts[part.name] = parts.get(part.name, 0.0) + part.end_us - part.start_us
    detail = ", ".join(f"{escape(name)} {format_milliseconds(time_us)}" for name, time_us in parts.items())
    name = f"{escape(slowest.role)}.<wbr>{escape(slowest.method)}" if "." in slowest.name else escape(slowest.name)
    return (
        Markup(f"<i></i>{number}"),
        Markup(f"<code>{name}</code>" + (f"<small>{detail}</small>" if detail else "")),
        len(calls),
        format_milliseconds(begins_us),
        format_milliseconds(slowest.end_us - slowest.start_us),
        format_bytes(sum(read)) if read else "",
    )
