"""MLflow: a run at the tracking URI, which is the library's default or `MLFLOW_TRACKING_URI`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from hf_algorithms.trackers._tracker import EXPERIMENT, RunFacts, Status, describe_value, flatten

__all__ = ["MlflowTracker"]

_MOST_PARAMS = 100
_MOST_METRICS = 1000
"""Of one request."""
_LONGEST_VALUE = 500
"""Characters of a parameter that every server takes."""
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_REFUSED = re.compile(r"[^\w.\-/ ]")
"""Characters that names may not have, such as that of `pass@4`."""


class MlflowTracker:
    """An MLflow run, by a client of its own: what the user's program has open is left alone."""

    def start(self, run: RunFacts) -> str | None:
        """Makes the experiment, if it is absent, and a run with the configuration as parameters."""
        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(name)
        made = self._client.create_run(identity, run_name=run.name, tags={"algorithm": run.algorithm})
        self._run_id = made.info.run_id
        given = [(key, describe_value(value)) for key, value in flatten(run.config)]
        params = [Param(_REFUSED.sub("_", key), text[:_LONGEST_VALUE]) for key, text in given]
        for begin in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[begin : begin + _MOST_PARAMS])
        return None

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics, whose step is the iteration."""
        now_ms = int(time.time() * 1000)
        found = [Metric(_REFUSED.sub("_", name), value, now_ms, iteration) for name, value in metrics.items()]
        for begin in range(0, len(found), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=found[begin : begin + _MOST_METRICS])

    def finish(self, status: Status, summary: Mapping[str, Any], iteration: int) -> None:
        """Adds the summary's numbers as metrics and its names as tags, and ends the run."""
        numbers = {f"summary/{name}": value for name, value in summary.items() if isinstance(value, float)}
        names = {name: value for name, value in {"status": status, **summary}.items() if isinstance(value, str)}
        self.log(iteration, numbers)
        tags = [RunTag(f"summary.{_REFUSED.sub('_', name)}", value) for name, value in names.items()]
        self._client.log_batch(self._run_id, tags=tags)
        self._client.set_terminated(self._run_id, _STATUS[status])
