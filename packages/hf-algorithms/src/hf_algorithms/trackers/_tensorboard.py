"""TensorBoard: event files in `tensorboard/` of the run's directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tensorboard  # noqa: F401 - torch imports it later, and its error would not name the package
from torch.utils.tensorboard import SummaryWriter

from hf_algorithms.trackers._tracker import RunFacts, Status

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker:
    """Scalars of metrics and of the summary; the configuration as a text."""

    def start(self, run: RunFacts) -> str | None:
        """Opens an event file."""
        self._writer = SummaryWriter(str(run.directory / "tensorboard"))
        self._add_text("config", run.config, 0)
        self._writer.flush()
        return None

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Adds a scalar for each metric, and writes them out."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def finish(self, status: Status, summary: Mapping[str, Any], iteration: int) -> None:
        """Adds the summary and closes the file."""
        for name, value in summary.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"summary/{name}", value, iteration)
        self._add_text("summary", {"status": status, **summary}, iteration)
        self._writer.close()

    def _add_text(self, name: str, body: Mapping[str, Any], iteration: int) -> None:
        text = f"```json\n{json.dumps(body, indent=2)}\n```"  # the page shows Markdown
        self._writer.add_text(name, text, iteration)
