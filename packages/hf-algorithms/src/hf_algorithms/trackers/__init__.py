"""Experiment trackers that follow a run: TensorBoard, W&B, MLflow and Trackio, by one word each, and a user's hook.

One file for each tracker, which alone imports its library, when a run asks for it. A tracker gets the configuration,
the metrics of every iteration and the summary: numbers and settings, never samples or secrets. What must not live here:
reading a run's files, which is in `report`.
"""

from __future__ import annotations

from hf_algorithms.trackers._follow import MetricsHook, Tracking, prepare_tracking
from hf_algorithms.trackers._names import TRACKERS, check_names
from hf_algorithms.trackers._tracker import RunFacts, Status, Tracker

__all__ = [
    "TRACKERS",
    "MetricsHook",
    "RunFacts",
    "Status",
    "Tracker",
    "Tracking",
    "check_names",
    "prepare_tracking",
]
