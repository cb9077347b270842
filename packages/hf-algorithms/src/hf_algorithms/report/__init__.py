"""A run's directory as one page, `report.html` (no network, no server, no scripts), and its trace as two tables.

What lives here: pages, figures and tables of a run's files.
What must not: anything that reads a run in another way than by its files.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from hf_algorithms.atomic_files import write_text
from hf_algorithms.report._breakdown import Breakdown, Usage, compute_breakdown
from hf_algorithms.report._breakdown_tables import render_breakdown
from hf_algorithms.report._files import read_run, read_trace
from hf_algorithms.report._metric_meanings import METRIC_MEANINGS, describe_metric
from hf_algorithms.report._page import render_page
from hf_algorithms.report._timeline import read_calls
from hf_protocols.errors import DataError

__all__ = [
    "METRIC_MEANINGS",
    "Breakdown",
    "Usage",
    "describe_metric",
    "leave_report",
    "load_breakdown",
    "render_breakdown",
    "write_report",
]


def load_breakdown(directory: str | Path) -> Breakdown:
    """Returns the times of the calls of the run in `directory`, from its `trace.json`.

    Raises:
        DataError: when there is no trace, it is damaged, or it has no call.
    """
    directory = Path(directory)
    calls = read_calls(read_trace(directory))
    try:
        return compute_breakdown(calls)
    except DataError as error:
        raise DataError(f"{directory / 'trace.json'}: {error}") from None


def write_report(directory: str | Path) -> Path:
    """Writes `report.html` from the files that a run left in `directory`, and returns its path.

    Reads `config.toml`, `metrics.jsonl`, `summary.json`, `trace.json` and `samples/`. If a file is absent,
    its part of the page is left out; a file that cannot be read is named on the page.

    Raises:
        DataError: when none of the files is there, or the page cannot be written.
    """
    directory = Path(directory)
    page = render_page(read_run(directory))
    try:
        return write_text(directory / "report.html", page)
    except OSError as error:
        raise DataError(f"{directory / 'report.html'} cannot be written: {error.strerror}") from error


def leave_report(directory: str | Path, note: Callable[[str], object]) -> None:
    """Writes the report of a run that has ended. If it cannot be written, `note` is given a line with the reason."""
    try:
        write_report(directory)
    except DataError as error:
        note(f"{error}. Write it later: hybridflow report {shlex.quote(str(directory))}")
