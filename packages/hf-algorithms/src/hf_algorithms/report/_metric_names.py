"""Titles of metrics, and the order in which they are shown."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["choose_first", "format_title"]

_TITLES = {"reward/mean": "Reward", "kl_sequence/k3": "KL to the reference"}
"""Below the evaluations; losses follow, everything else is folded away."""
_EVALUATION = "eval/"


def choose_first(metrics: Collection[str]) -> list[str]:
    """Returns the metrics that a reader sees first, in order: evaluations, reward, KL, losses."""
    shown = [metric for metric in metrics if metric.startswith(_EVALUATION)]
    shown += [metric for metric in _TITLES if metric in metrics]
    return shown + [metric for metric in metrics if metric.endswith("loss")]


def format_title(metric: str) -> str:
    """Returns the title of the metric's curve."""
    if metric.startswith(_EVALUATION):
        rows, _, name = metric.removeprefix(_EVALUATION).partition("/")
        return f"{name}, {rows}"
    return _TITLES.get(metric) or metric.replace("/", " ").replace("_", " ").capitalize()
