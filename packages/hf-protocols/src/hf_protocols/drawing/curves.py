"""Line charts over iterations, tokens or seconds, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from hf_protocols.drawing.numbers import format_number, round_ticks

__all__ = ["Curve", "Line", "Point", "render_curve", "render_spark"]

Point = tuple[float, float]

_WIDTH, _HEIGHT = 360.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 10.0, 8.0, 22.0
# With this many points single values are noise to the eye, and a running mean is drawn over them.
_SMOOTHED_FROM = 30
_DOTTED_UP_TO = 40


@dataclass(frozen=True, kw_only=True)
class Line:
    """One run's values of a metric.

    Attributes:
        points: finite values only.
        means: means over stretches of a longer curve, whose extremes are in `points`; empty where `points` holds the
            whole curve.
        colour: number of the palette.
        name: of the run, where a chart has several.
    """

    points: Sequence[Point]
    means: Sequence[Point] = ()
    colour: int = 0
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric over iterations, or over another measure of progress.

    Attributes:
        title: what the reader sees.
        metric: its name in `metrics.jsonl`.
        lines: one a run, each with at least one point.
        span: first and last value of the horizontal axis, so that all charts have one scale.
        guides: named horizontal lines.
        band: values between which the metric is expected, or None.
        axis: what the horizontal axis counts.
        meaning: of the metric, which appears when a reader points at its name.
    """

    title: str
    metric: str
    lines: Sequence[Line]
    span: tuple[float, float]
    guides: Mapping[str, float] = field(default_factory=dict)
    band: tuple[float, float] | None = None
    axis: str = "iteration"
    meaning: str = ""


def render_curve(curve: Curve) -> str:
    """Returns a `<figure>` with the chart; the last values are in the caption."""
    frame = _Frame(curve)
    parts = [_band(frame, curve.band), _axes(frame)]
    parts += [_guide(frame, name, value) for name, value in curve.guides.items()]
    parts += [_draw_line(frame, line, curve.axis) for line in curve.lines]
    label = f"{curve.title}: " + "; ".join(_describe(line, curve.axis) for line in curve.lines)
    size = f'data-low="{frame.x_low:g}" data-high="{frame.x_high:g}"'
    return (
        f'<figure class="curve c{curve.lines[0].colour}">{_caption(curve)}'
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" {size} role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _caption(curve: Curve) -> str:
    shown = [_last_value(line) for line in curve.lines]
    if len(shown) == 1:
        value, note = shown[0]
    else:
        value = " ".join(
            f'<i class="c{line.colour}" title="{escape(line.name)}">{text}</i>'
            for line, (text, _) in zip(curve.lines, shown, strict=True)
        )
        note = "last"
    hint = f' title="{escape(curve.meaning)}"' if curve.meaning else ""
    return (
        f"<figcaption{hint}><b>{escape(curve.title)}</b><span>{value}</span><code>{escape(curve.metric)}</code>"
        f"<small>{note}</small></figcaption>"
    )


def _last_value(line: Line) -> tuple[str, str]:
    """The value of the caption, and how it was formed."""
    if len(line.points) < _SMOOTHED_FROM:
        return format_number(line.points[-1][1]), "last"
    values = [y for _, y in (line.means or line.points)]
    window = _window(len(values))
    mean = format_number(math.fsum(values[-window:]) / window)
    return mean, "mean of the last part" if line.means else f"mean of last {window}"


def _describe(line: Line, axis: str) -> str:
    (first_x, first_y), (last_x, last_y) = line.points[0], line.points[-1]
    ends = (
        f"{format_number(first_y)} at {axis} {format_number(first_x)}, "
        f"{format_number(last_y)} at {axis} {format_number(last_x)}"
    )
    return f"{line.name}, {ends}" if line.name else ends


def _draw_line(frame: _Frame, line: Line, axis: str) -> str:
    parts = []
    if len(line.points) >= _SMOOTHED_FROM:
        parts += [_path(frame, line.points, "raw"), _path(frame, _smooth(line.means or line.points), "line")]
    else:
        parts.append(_path(frame, line.points, "line"))
    if len(line.points) <= _DOTTED_UP_TO:
        parts += [_dot(frame, point, axis) for point in line.points]
    return f'<g class="c{line.colour}">{"".join(parts)}</g>'


def render_spark(points: Sequence[Point], band: tuple[float, float] | None, label: str) -> str:
    """Returns a small chart without axes, as wide as its place; the band is drawn behind the line."""
    ys = [y for _, y in points] + list(band or ())
    low, high = min(ys), max(ys)
    span, (first, last) = high - low or 1.0, (points[0][0], points[-1][0])

    def place(x: float, y: float) -> tuple[float, float]:
        return 100 * (x - first) / ((last - first) or 1.0), 2 + 26 * (1 - (y - low) / span)

    line = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
    area = ""
    if band is not None:
        top, bottom = place(first, band[1])[1], place(first, band[0])[1]
        area = f'<rect class="band" width="100" y="{top:.1f}" height="{max(bottom - top, 0.5):.1f}"/>'
    return (
        f'<svg class="spark" viewBox="0 0 100 30" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f'{area}<polyline points="{line}"/></svg>'
    )


class _Frame:
    """From values to pixels."""

    def __init__(self, curve: Curve) -> None:
        ys = [y for line in curve.lines for _, y in line.points] + list(curve.guides.values())
        self.x_low, self.x_high = curve.span
        low, high = min(ys), max(ys)
        margin = 0.06 * (high - low) or 0.5 * max(abs(high), 1e-9)
        # Zero is part of the picture where the values come near it.
        self.y_low = 0.0 if 0 <= low <= 0.5 * high else low - margin
        self.y_high = high + margin

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low
        share = (value - self.x_low) / span if span else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _axes(frame: _Frame) -> str:
    parts = []
    for value in round_ticks(frame.y_low, frame.y_high, 4):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 6:g}" y="{y + 3.5:.1f}">{format_number(value)}</text>')
    for value in round_ticks(frame.x_low, frame.x_high, 6):
        x, y = frame.x(value), _HEIGHT - 6
        parts.append(f'<text class="tick middle" x="{x:.1f}" y="{y:g}">{format_number(value)}</text>')
    return "".join(parts)


def _guide(frame: _Frame, name: str, value: float) -> str:
    y = frame.y(value)
    return (
        f'<line class="guide" x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{_LEFT + 4:g}" y="{y - 4:.1f}">{escape(name)} {format_number(value)}</text>'
    )


def _path(frame: _Frame, points: Sequence[Point], style: str) -> str:
    pixels = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return f'<polyline class="{style}" points="{pixels}"/>'


def _band(frame: _Frame, band: tuple[float, float] | None) -> str:
    if band is None:
        return ""
    top, bottom = (frame.y(min(max(value, frame.y_low), frame.y_high)) for value in (band[1], band[0]))
    width = _WIDTH - _LEFT - _RIGHT
    return f'<rect class="band" x="{_LEFT:g}" y="{top:.1f}" width="{width:g}" height="{max(bottom - top, 1):.1f}"/>'


def _dot(frame: _Frame, point: Point, axis: str) -> str:
    x, y = point
    title = f"{axis} {format_number(x)}: {format_number(y)}"
    return f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"><title>{escape(title)}</title></circle>'


def _smooth(points: Sequence[Point]) -> list[Point]:
    """The mean around each point."""
    half = _window(len(points)) // 2
    parts = (points[max(0, i - half) : i + half + 1] for i in range(len(points)))
    return [(x, math.fsum(y for _, y in part) / len(part)) for (x, _), part in zip(points, parts, strict=True)]


def _window(num_points: int) -> int:
    return max(2, num_points // 12)
