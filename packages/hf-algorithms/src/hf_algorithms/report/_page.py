"""The page: sections in the order in which a reader asks, the last with responses before and after the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import zip_longest
from typing import Any

from hf_algorithms.report._decimation import decimate
from hf_algorithms.report._files import RunFiles, describe_end
from hf_algorithms.report._gantt import render_gantt
from hf_algorithms.report._json_values import read_number
from hf_algorithms.report._metric_meanings import describe_metric
from hf_algorithms.report._metric_names import choose_first, format_title
from hf_algorithms.report._timeline import choose_iteration, read_timeline
from hf_protocols.drawing import (
    Curve,
    Line,
    Markup,
    choose_colours,
    format_bytes,
    format_duration,
    format_number,
    render_curve,
    render_document,
    render_section,
    render_table,
)

__all__ = ["render_page", "render_samples"]

_MOST_POINTS = 400
"""Of a curve: a chart is as many pixels wide."""


def render_page(run: RunFiles) -> str:
    """The whole page as one string; everything that came from a file is escaped."""
    title = f"{run.name}: {run.algorithm}" if run.algorithm else run.name
    sections = [_header(run), _tiles(run), _curves(run), _iteration(run), _samples(run), _settings(run)]
    return render_document(title, "\n".join(filter(None, sections)))


def _header(run: RunFiles) -> str:
    kind = f"<span>{escape(run.algorithm.upper())}</span>" if run.algorithm else ""
    warnings = [*filter(None, [describe_end(run.summary)]), *run.unreadable[:5]]
    notes = "".join(f'<p class="warning">{escape(warning)}</p>' for warning in warnings)
    return f'<header><p class="brand">HybridFlow {kind}</p><h1>{escape(run.name)}</h1>{notes}</header>'


# ---------------------------------------------------------------------------------------------------- headline numbers


def _tiles(run: RunFiles) -> str:
    tiles = [
        _score_tile(run),
        _kl_tile(run),
        _iterations_tile(run),
        _speed_tile(run),
        _memory_tile(run),
        _commit_tile(run),
    ]
    shown = "".join(tile for tile in tiles if tile)
    return f'<section class="tiles">{shown}</section>' if shown else ""


def _tile(name: str, value: str, detail: str = "") -> str:
    return f"<div><h2>{name}</h2><p>{value}</p><small>{detail}</small></div>"


def _score_tile(run: RunFiles) -> str:
    name, before, after = _metric(run), *_scores(run)
    known = [value for value in (before, after) if value is not None]
    if not known:
        return ""
    falls = run.summary.get("lower_is_better") is True
    is_share = not falls and all(0 <= value <= 1 for value in known)
    first, *rest = [f"{value:.1%}" if is_share else format_number(value) for value in known]
    if before is None or after is None:
        return _tile(escape(name), first, f"rows of the evaluation{'; lower is better' if falls else ''}")
    change = f"{100 * (after - before):+.1f} points" if is_share else f"{after - before:+.3g}"
    detail = f"{change} on rows of the evaluation{'; lower is better' if falls else ''}"
    return _tile(escape(name), f"<s>{first}</s> &rarr; {rest[0]}", detail)


def _metric(run: RunFiles) -> str:
    name = run.summary.get("metric")
    return name if isinstance(name, str) else "score"


def _scores(run: RunFiles) -> tuple[float | None, float | None]:
    return read_number(run.summary.get("score_before")), read_number(run.summary.get("score_after"))


def _kl_tile(run: RunFiles) -> str:
    divergence = run.summary.get("kl_to_reference")
    if not isinstance(divergence, Mapping) or (value := read_number(divergence.get("value"))) is None:
        return ""
    detail = f"{divergence.get('unit', '')}, {divergence.get('estimator', '')}"
    return _tile("KL to the reference", format_number(value), escape(detail))


def _iterations_tile(run: RunFiles) -> str:
    value, warm = (read_number(run.summary.get(name)) for name in ("iterations", "warm_start_steps"))
    detail = f"after {warm:.0f} steps of warm start" if warm else ""
    return "" if value is None else _tile("Iterations", format_number(value), detail)


def _speed_tile(run: RunFiles) -> str:
    wall, tokens, samples = (read_number(run.summary.get(name)) for name in ("wall_s", "tokens_per_s", "samples_per_s"))
    rates = [(tokens, "tokens/s"), (samples, "samples/s")]
    detail = ", ".join(f"{format_number(rate)} {unit}" for rate, unit in rates if rate is not None)
    return "" if wall is None else _tile("Wall time", format_duration(wall), detail)


def _memory_tile(run: RunFiles) -> str:
    value = read_number(run.summary.get("peak_rss_bytes"))
    return "" if value is None else _tile("Peak memory", format_bytes(value), "all processes together")


def _commit_tile(run: RunFiles) -> str:
    share, last = (read_number(run.summary.get(name)) for name in ("checkpoint_share", "last_commit"))
    detail = "" if last is None else f", the last one after iteration {format_number(last)}"
    return "" if share is None else _tile("Checkpoints", f"{share:.1%}", f"of the time{detail}")


# ----------------------------------------------------------------------------------------------------- the parts below


def _curves(run: RunFiles) -> str:
    curves = _read_curves(run)
    shown = choose_first(curves)
    folded = [metric for metric in curves if metric not in shown]
    if not curves:
        return ""
    body = f'<div class="curves">{"".join(render_curve(curves[metric]) for metric in shown)}</div>'
    if folded:
        body += (
            f"<details><summary>{len(folded)} more metrics</summary>"
            f'<div class="curves">{"".join(render_curve(curves[metric]) for metric in folded)}</div></details>'
        )
    return render_section("Learning curves", "By iteration; over noisy values the thick line is a running mean.", body)


def _read_curves(run: RunFiles) -> dict[str, Curve]:
    """Finite values of every metric by iteration, in the order of the names."""
    found = {name: decimate(run.iterations, run.columns[name], _MOST_POINTS) for name in sorted(run.columns)}
    found = {metric: each for metric, each in found.items() if each.points}
    colours = choose_colours(metric.partition("/")[0] for metric in found)
    xs = [x for each in found.values() for x, _ in each.points]
    return {
        metric: Curve(
            title=format_title(metric),
            metric=metric,
            lines=[Line(points=points, means=means, colour=colours[metric.partition("/")[0]])],
            span=(min(xs), max(xs)),
            guides=_guides(run, metric),
            meaning=describe_metric(metric),
        )
        for metric, (points, means) in found.items()
    }


def _guides(run: RunFiles, metric: str) -> dict[str, float]:
    if metric != f"eval/validation/{_metric(run)}":
        return {}
    values = dict(zip(("held out, before", "after"), _scores(run), strict=True))
    return {name: value for name, value in values.items() if value is not None}


def _iteration(run: RunFiles) -> str:
    timelines = read_timeline(run.events)
    timeline = choose_iteration(timelines)
    if timeline is None:
        return ""
    length = format_duration((timeline.end_us - timeline.start_us) / 1e6)
    which = f"Iteration {timeline.iteration} ({length}, the median of {len(timelines)})."
    how = "One row per rank, one bar per call; thin bars are phases within a call; numbers refer to the table below."
    return render_section("One iteration", f"{which} {how}", render_gantt(timeline))


def _samples(run: RunFiles) -> str:
    if not any(run.samples.values()):
        return ""
    return render_section("Samples", "Greedy responses to held-out prompts.", render_samples(run.samples))


def _settings(run: RunFiles) -> str:
    versions = run.summary.get("versions")
    body = ""
    if isinstance(versions, dict) and versions:
        rows = [(name, Markup(f"<code>{escape(str(value))}</code>")) for name, value in versions.items()]
        body += render_table(("", ""), rows, style="versions")
    if run.config_text.strip():
        body += f"<details open><summary>config.toml</summary><pre>{escape(run.config_text.strip())}</pre></details>"
    return render_section("Configuration and versions", "", body) if body else ""


_SampleRow = Mapping[str, Any]

_MOMENTS = ("before", "after")


def render_samples(samples: Mapping[str, Sequence[_SampleRow]]) -> str:
    """One card per prompt, with its answer and the response at each moment."""
    pairs = zip_longest(*(samples.get(moment, ()) for moment in _MOMENTS))
    return f'<div class="samples">{"".join(_card(pair) for pair in pairs)}</div>'


def _card(pair: Sequence[_SampleRow | None]) -> str:
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


def _response(moment: str, sample: _SampleRow) -> str:
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


def _text(sample: _SampleRow, name: str) -> str:
    return escape(str(sample.get(name, "")))
