"""A run's directory as one page: ``report.html`` needs no network, no server and no scripts."""

from __future__ import annotations

from pathlib import Path

from hf_algorithms.atomic_files import write_text
from hf_algorithms.report._files import read_run
from hf_algorithms.report._page import render_page
from hf_protocols.errors import DataError

__all__ = ["write_report"]


def write_report(directory: str | Path) -> Path:
    """Write ``report.html`` from the files that a run left in ``directory``, and return its path.

    Reads ``config.toml``, ``metrics.jsonl``, ``summary.json``, ``trace.json`` and ``samples.json``. A file that is
    absent leaves out its part of the page; one that cannot be read is named on the page.

    Raises:
        DataError: when none of the files is there, or the page cannot be written.
    """
    directory = Path(directory)
    page = render_page(read_run(directory))
    try:
        return write_text(directory / "report.html", page)
    except OSError as error:
        raise DataError(f"{directory / 'report.html'} cannot be written: {error.strerror}") from error
