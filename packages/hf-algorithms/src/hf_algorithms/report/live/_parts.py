"""The parts of the page that show whole runs: curves, health, one iteration's calls, and a comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hf_algorithms.report._files import parse_settings
from hf_algorithms.report._gantt import render_gantt
from hf_algorithms.report._health import HealthNumber
from hf_algorithms.report._json_values import read_number
from hf_algorithms.report._metric_meanings import describe_metric
from hf_algorithms.report._metric_names import choose_first, format_title
from hf_algorithms.report._timeline import choose_iteration
from hf_algorithms.report.live._run import AXES, LiveRun
from hf_protocols.drawing import (
    Curve,
    Line,
    Markup,
    format_duration,
    format_number,
    render_curve,
    render_share,
    render_spark,
    render_table,
)

__all__ = [
    "compare_settings",
    "flatten_settings",
    "render_comparison",
    "render_comparison_part",
    "render_curves_part",
    "render_gantt_part",
    "render_health_part",
]

_MOST_CURVES = 24
"""Drawn at once; a filter finds the others."""


def render_curves_part(runs: Sequence[LiveRun], axis: str, wanted: str) -> str:
    """Returns the curves of all runs, on one scale.

    Args:
        runs: whose lines share the charts.
        axis: one of `AXES`.
        wanted: parts of metrics' names, separated by spaces; empty for those that a reader sees first.
    """
    known = sorted({metric for run in runs for metric in run.columns()})
    parts = wanted.split()
    shown = [metric for metric in known if any(part in metric for part in parts)] if parts else choose_first(known)
    found = {metric: _read_lines(runs, metric, axis) for metric in shown[:_MOST_CURVES]}
    found = {metric: lines for metric, lines in found.items() if lines}
    xs = [x for lines in found.values() for line in lines for x, _ in (line.points[0], line.points[-1])]
    figures = "".join(
        render_curve(
            Curve(
                title=format_title(metric),
                metric=metric,
                lines=lines,
                span=(min(xs), max(xs)),
                axis=AXES[axis],
                meaning=describe_metric(metric),
            )
        )
        for metric, lines in found.items()
    )
    if not known:
        return _note("No iteration is in metrics.jsonl yet.")
    if not found:
        said = f"No metric's name has {wanted!r}" if parts else "Name metrics above"
        return _note(f"{said}. There are: {', '.join(known)}")
    rest = len(shown) - min(len(shown), _MOST_CURVES)
    more = _note(f"{rest} further metrics match; narrow the filter to see them.") if rest else ""
    others = "" if parts else _list_others([metric for metric in known if metric not in shown])
    return f'<div class="curves">{figures}</div>{more}{others}'


def _list_others(metrics: Sequence[str]) -> str:
    """Buttons that show the metrics of one prefix."""
    prefixes = dict.fromkeys(metric.partition("/")[0] + "/" * ("/" in metric) for metric in metrics)
    buttons = "".join(f'<button data-set="{_change(filter=prefix)}">{escape(prefix)}</button>' for prefix in prefixes)
    return f'<p class="more">{len(metrics)} more metrics: {buttons}</p>' if metrics else ""


def _change(**values: str) -> str:
    from urllib.parse import urlencode

    return escape(urlencode(values))


def _read_lines(runs: Sequence[LiveRun], metric: str, axis: str) -> list[Line]:
    lines = []
    for run in runs:
        points, means = run.points(metric, axis)
        if points:
            lines.append(Line(points=points, means=means, colour=run.colour, name=run.name))
    return lines


def render_health_part(runs: Sequence[LiveRun]) -> str:
    """Returns a row of numbers for each run."""
    rows = []
    for run in runs:
        numbers = run.health()
        if numbers:
            title = f'<h3 class="c{run.colour}"><i></i>{escape(run.name)}</h3>' if len(runs) > 1 else ""
            rows.append(f'{title}<div class="health">{"".join(map(_health_tile, numbers))}</div>')
    return "".join(rows) or _note("None of the numbers that are watched is in metrics.jsonl yet.")


def _health_tile(number: HealthNumber) -> str:
    state = number.state
    text = {"": "no band before 25 iterations", "within": "within the band"}.get(state, f"{state} the band")
    band = "" if number.band is None else f" {format_number(number.band[0])} to {format_number(number.band[1])}"
    label = f"{number.name}: {format_number(number.last)}, {text}{band}"
    return (
        f'<div class="{"outside" if state in ("above", "below") else ""}" title="{escape(" + ".join(number.metrics))}">'
        f"<h4>{escape(number.name)}</h4><p>{format_number(number.last)}</p>"
        f"{render_spark(number.points, number.band, label)}<small>{escape(text)}{escape(band)}</small></div>"
    )


def render_gantt_part(run: LiveRun, iteration: int | None) -> str:
    """Returns the calls of an iteration, or of one of median length; before there is a trace, seconds by phase."""
    timelines = run.timelines()
    timeline = timelines.get(iteration) if iteration is not None else choose_iteration(timelines)
    if timeline is not None:
        length = format_duration((timeline.end_us - timeline.start_us) / 1e6)
        lead = f"<p>{escape(run.name)}, iteration {timeline.iteration}: {length}.</p>"
        return lead + render_gantt(timeline)
    note = run.trace_note or f"trace.json has no calls of iteration {iteration}."
    return _note(note) + _list_phases(run)


def _list_phases(run: LiveRun) -> str:
    """The newest iteration's seconds by phase, from its metrics."""
    total, phases = run.phases()
    if not phases:
        return ""
    rows = [
        (phase, format_duration(value), Markup(render_share(value / total, f"{value / total:.0%} of the iteration")))
        for phase, value in phases
    ]
    lead = f"<p>{escape(run.name)}, iteration {run.iteration} ({format_duration(total)}) by phase:</p>"
    return lead + render_table(("", "", ""), rows, numbers=(1,), style=f"phases c{run.colour}")


def render_comparison_part(runs: Sequence[LiveRun]) -> str:
    """Returns the results of the runs, and the keys of their configurations that differ."""
    names, colours = [run.name for run in runs], [run.colour for run in runs]
    results = render_comparison(_collect_results(runs), names, colours)
    if len(runs) == 1:
        text = runs[0].config_text.strip()
        settings = f"<details><summary>config.toml</summary><pre>{escape(text)}</pre></details>" if text else ""
        return results + (settings or _note("config.toml is absent or empty."))
    differing = compare_settings([run.config_text for run in runs])
    if not differing:
        return results + _note("No key of the configurations differs.")
    return f"{results}<h3>Keys that differ</h3>{render_comparison(differing, names, colours)}"


def _collect_results(runs: Sequence[LiveRun]) -> dict[str, list[str | None]]:
    rows: dict[str, list[str | None]] = {
        "state": [run.describe_state()[0] for run in runs],
        "algorithm": [run.algorithm or None for run in runs],
        "iterations": [format_number(run.iteration) for run in runs],
    }
    for name in ("metric", "score_before", "score_after", "tokens_per_s", "samples_per_s"):
        rows[name] = [_format(run.summary.get(name)) for run in runs]
    rows["wall_s"] = [_format(run.summary.get("wall_s"), is_duration=True) for run in runs]
    rows["kl_to_reference"] = [_format(_inside(run.summary.get("kl_to_reference"))) for run in runs]
    return {name: values for name, values in rows.items() if any(value is not None for value in values)}


def _inside(value: object) -> object:
    return value.get("value") if isinstance(value, Mapping) else None


def _format(value: Any, *, is_duration: bool = False) -> str | None:
    if (number := read_number(value)) is None:
        return value if isinstance(value, str) else None
    return format_duration(number) if is_duration else format_number(number)


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


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
