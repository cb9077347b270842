"""A run on a terminal: where it stands, curves, health, phases of an iteration, and its last samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice, pairwise

from rich.cells import set_cell_size
from rich.text import Text

from hf_algorithms.report._files import parse_settings
from hf_algorithms.report._metric_names import choose_first, format_title
from hf_algorithms.report.live import LiveRun
from hf_protocols.drawing import format_duration, format_number, format_sparkline

__all__ = ["draw_run"]

_STYLES = {"finished": "green", "running": "cyan", "failed": "bold red", "interrupted": "yellow", "gone": "bold red"}
_HEALTH_STYLES = {"above": "bold yellow", "below": "bold yellow", "within": "green"}
_TITLE_WIDTH = 26
_NUMBERS_WIDTH = 24
_MOST_CURVES, _MOST_PHASES, _MOST_SAMPLES = 10, 8, 6
_WINDOW = 20
"""Iterations whose mean duration predicts the rest."""


def draw_run(run: LiveRun, *, width: int, height: int | None = None, ascii_only: bool = False) -> list[Text]:
    """Returns lines that fit a terminal; what has no room is left out, samples first.

    Args:
        run: refreshed by the caller.
        width: cells of a line.
        height: lines at most; None for all.
        ascii_only: no blocks, for consoles that cannot show them.
    """
    head, health, notes = _draw_head(run), _draw_health(run, width), _draw_notes(run)
    left = math.inf if height is None else height - len(head) - len(health) - len(notes)
    curves = _draw_curves(run, width, ascii_only)
    curves = curves[: max(3, int(left // 3))] if left < math.inf else curves
    phases = _draw_phases(run, width, ascii_only)
    phases = phases[: max(3, int((left - len(curves)) // 2))] if left < math.inf else phases
    lines = [*head, *notes, *curves, *health, *phases, *_draw_samples(run)]
    for line in lines:
        line.truncate(width, overflow="ellipsis" if not ascii_only else "crop")
    return lines[:height]


def _draw_head(run: LiveRun) -> list[Text]:
    state, detail = run.describe_state()
    total = _count_iterations(run)
    parts = [
        (f"{_clean(run.name)}  ", "bold"),
        (f"{_clean(run.algorithm)}  ", ""),
        (state, _STYLES.get(state, "yellow")),
        (f"  iteration {run.iteration:,}{f' of {total:,}' if total else ''}", ""),
    ]
    if state == "running" and (left_s := _predict(run, total)) is not None:
        parts.append((f"  about {format_duration(left_s)} left", ""))
    lines = [Text.assemble(*parts)]
    if detail:
        lines.append(Text(_clean(detail), "dim"))
    return lines


def _count_iterations(run: LiveRun) -> int:
    section = parse_settings(run.config_text).get("run", {})
    total = section.get("iterations") if isinstance(section, dict) else None
    return total if type(total) is int and total > 0 else 0


def _predict(run: LiveRun, total: int) -> float | None:
    seconds = [value for value in run.columns().get("time/iteration_s", ())[-_WINDOW:] if math.isfinite(value)]
    if not seconds or run.iteration >= total:
        return None
    return math.fsum(seconds) / len(seconds) * (total - run.iteration)


def _draw_curves(run: LiveRun, width: int, ascii_only: bool) -> list[Text]:
    columns, lines = run.columns(), [_heading("Curves")]
    room = max(0, width - _TITLE_WIDTH - _NUMBERS_WIDTH)
    for metric in islice(choose_first(columns), _MOST_CURVES):
        points, means = run.points(metric, "iteration")
        if not points:
            continue
        spark = "" if ascii_only else format_sparkline(_squeeze([value for _, value in means or points], room))
        numbers = f"{format_number(points[0][1])} -> {format_number(points[-1][1])}"
        line = Text(set_cell_size(f"  {_clean(format_title(metric))}", _TITLE_WIDTH - 1) + " ")
        lines.append(line.append(set_cell_size(numbers, _NUMBERS_WIDTH), "bold").append(spark, "green"))
    return lines if len(lines) > 1 else [*lines, Text("  no values yet", "dim")]


def _squeeze(values: Sequence[float], room: int) -> list[float]:
    """The values, or the means of as many even stretches as there is room for."""
    if len(values) <= room or room == 0:
        return list(values[:room])
    edges = [len(values) * number // room for number in range(room + 1)]
    return [math.fsum(values[start:end]) / (end - start) for start, end in pairwise(edges) if end > start]


def _draw_health(run: LiveRun, width: int) -> list[Text]:
    """Numbers next to one another, as many lines as they need."""
    numbers = run.health()
    if not numbers:
        return []
    lines, line = [_heading("Health")], Text("  ")
    for number in numbers:
        state = f" {number.state} its band" if number.state in ("above", "below") else ""
        cell = Text.assemble(
            (f"{number.name} ", "dim"), (f"{format_number(number.last)}{state}", _HEALTH_STYLES.get(number.state, ""))
        )
        if line.cell_len > 2 and line.cell_len + cell.cell_len > width:
            lines.append(line)
            line = Text("  ")
        line.append_text(cell).append("   ")
    return [*lines, line]


def _draw_phases(run: LiveRun, width: int, ascii_only: bool) -> list[Text]:
    """Seconds of the newest iteration by phase."""
    total, phases = run.phases()
    if not phases:
        return []
    room = max(0, width - _TITLE_WIDTH - _NUMBERS_WIDTH)
    block = "#" if ascii_only else chr(0x2588)
    lines = [_heading(f"Phases of iteration {run.iteration:,}, {format_duration(total)}")]
    for phase, value in phases[:_MOST_PHASES]:
        share = min(max(value / total, 0.0), 1.0)
        line = Text(set_cell_size(f"  {_clean(phase)}", _TITLE_WIDTH - 1) + " ")
        line.append(set_cell_size(f"{format_duration(value)}, {share:.0%}", _NUMBERS_WIDTH), "bold")
        lines.append(line.append(block * round(room * share), "blue"))
    return lines


def _draw_samples(run: LiveRun) -> list[Text]:
    """The samples of the last iteration that has any, two lines each."""
    iteration, *_ = run.samples.nearest(None)
    if iteration is None:
        return []
    rows, notes = run.samples.read(iteration)
    lines = [_heading(f"Samples of iteration {iteration:,}, {len(rows):,} rows")]
    lines += [Text(f"  {_clean(note)}", "yellow") for note in notes]
    for row in rows[:_MOST_SAMPLES]:
        mark = "" if row.score is None else f"{format_number(row.score):>7}  "
        lines.append(Text.assemble(f"  {mark}", (_clean(row.prompt), "dim")))
        lines.append(Text(f"  {' ' * len(mark)}{_clean(row.response)}"))
    return lines if rows else []


def _draw_notes(run: LiveRun) -> list[Text]:
    return [Text(_clean(note), "yellow") for note in run.notes()]


def _heading(text: str) -> Text:
    return Text(text, "bold underline")


def _clean(text: str) -> str:
    """The text on one line; characters that would move the cursor or hide others become spaces."""
    return "".join(character if character.isprintable() else " " for character in text)
