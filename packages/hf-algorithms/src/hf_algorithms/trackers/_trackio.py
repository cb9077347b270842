"""Trackio: a run in its folder of projects, or where `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import trackio

from hf_algorithms.trackers._tracker import EXPERIMENT, RunFacts, Status

__all__ = ["TrackioTracker"]


class TrackioTracker:
    """A Trackio run; `trackio show` draws it."""

    def start(self, run: RunFacts) -> str | None:
        """Begins a run."""
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", EXPERIMENT),
            name=run.name,
            config=dict(run.config),
            embed=False,
            auto_log_cpu=False,
        )
        return None

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Adds a row of metrics."""
        self._run.log(dict(metrics), step=iteration)

    def finish(self, status: Status, summary: Mapping[str, Any], iteration: int) -> None:
        """Adds the summary as a row of its own, and waits until all rows are written."""
        row = {f"summary/{name}": value for name, value in {"status": status, **summary}.items()}
        self._run.log(row, step=iteration)
        self._run.finish()
