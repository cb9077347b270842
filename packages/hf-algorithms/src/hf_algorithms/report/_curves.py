"""Line charts over iterations, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from hf_algorithms.report._numbers import format_number, round_ticks

__all__ = ["Curve", "render_curve"]

Point = tuple[float, float]

_WIDTH, _HEIGHT = 360.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 10.0, 8.0, 22.0
# With this many points single values are noise to the eye, and a running mean is drawn over them.
_SMOOTHED_FROM = 30
_DOTTED_UP_TO = 40


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric over iterations.

    Attributes:
        title: what the reader sees.
        metric: its name in ``metrics.jsonl``.
        points: (iteration, value), finite values only.
        iterations: first and last of the run, so that all charts have one scale.
        guides: named horizontal lines.
        colour: number of the palette.
    """

    title: str
    metric: str
    points: Sequence[Point]
    iterations: tuple[float, float]
    guides: Mapping[str, float] = field(default_factory=dict)
    colour: int = 0


def render_curve(curve: Curve) -> str:
    """A ``<figure>`` with the chart; its last value stands in the caption."""
    frame = _Frame(curve)
    last_x, last_y = curve.points[-1]
    first_x, first_y = curve.points[0]
    label = (
        f"{curve.title}: {format_number(first_y)} at iteration {format_number(first_x)}, "
        f"{format_number(last_y)} at iteration {format_number(last_x)}"
    )
    values = [y for _, y in curve.points]
    smooth = _smooth(values)
    window = _window(len(values)) if smooth else 1
    note = f"mean of last {window}" if smooth else "last"
    shown = math.fsum(values[-window:]) / window
    parts = [_axes(frame), *(_guide(frame, name, value) for name, value in curve.guides.items())]
    if smooth:
        averaged = [(x, y) for (x, _), y in zip(curve.points, smooth, strict=True)]
        parts += [_path(frame, curve.points, "raw"), _path(frame, averaged, "line")]
    else:
        parts.append(_path(frame, curve.points, "line"))
    if len(curve.points) <= _DOTTED_UP_TO:
        parts += [_dot(frame, point) for point in curve.points]
    return (
        f'<figure class="curve c{curve.colour}"><figcaption><b>{escape(curve.title)}</b>'
        f"<span>{format_number(shown)}</span><code>{escape(curve.metric)}</code><small>{note}</small></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
        "</figure>"
    )


class _Frame:
    """From values to pixels."""

    def __init__(self, curve: Curve) -> None:
        ys = [y for _, y in curve.points] + list(curve.guides.values())
        self.x_low, self.x_high = curve.iterations
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


def _dot(frame: _Frame, point: Point) -> str:
    x, y = point
    title = f"iteration {format_number(x)}: {format_number(y)}"
    return f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"><title>{title}</title></circle>'


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean around each point; empty where there are too few points to need it."""
    if len(values) < _SMOOTHED_FROM:
        return []
    half = _window(len(values)) // 2
    parts = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [math.fsum(part) / len(part) for part in parts]


def _window(num_points: int) -> int:
    return max(2, num_points // 12)
