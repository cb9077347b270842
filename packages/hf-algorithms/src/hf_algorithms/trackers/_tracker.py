"""Interface of a tracker, and the facts about a run that it gets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from hf_algorithms.url_secrets import hide_secrets, is_secret_name

__all__ = [
    "EXPERIMENT", "RunFacts", "Status", "Tracker", "describe_value", "flatten", "hide_config_secrets", "select_numbers",
    "select_summary",
]  # fmt: skip

Status = Literal["finished", "interrupted", "failed"]
"""End of a run: all iterations, stopped by the user or a signal, or an error."""
EXPERIMENT = "hybridflow"
"""Project, or experiment, of all runs; each library has an environment variable for another one."""
_HIDDEN = "***"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run, which a tracker gets when it starts."""

    name: str
    """Name of the run: that of its directory."""
    directory: Path
    """Directory of the run."""
    algorithm: str
    """Name of the algorithm."""
    config: Mapping[str, Any]
    """Sections and keys of `config.toml`, without secrets."""


class Tracker(Protocol):
    """One experiment tracker. A run calls its methods one after another, in a thread of the tracker's own.

    Errors of any class may leave a method: the run goes on without the tracker.
    """

    def start(self, run: RunFacts) -> str | None:
        """Begins the run; returns a note for the user, if there is one."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Takes the finite metrics of an iteration."""

    def finish(self, status: Status, summary: Mapping[str, Any], iteration: int) -> None:
        """Takes what `select_summary` leaves of the summary, flat, and ends the run after its last iteration."""


def select_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a row of metrics, its iteration left out."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "iteration" and isinstance(value, int | float) and math.isfinite(value)
    }


def select_summary(body: Mapping[str, Any]) -> dict[str, str | float]:
    """Returns the numbers and names of a summary, flat.

    Lists and error messages are left out, because they may quote rows of the user's data. Of an error the class stays.
    """
    found: dict[str, str | float] = {}
    for name, value in flatten(body):
        if isinstance(value, bool | str):
            if name.rpartition(".")[2] != "message":
                found[name] = str(value)
        elif isinstance(value, int | float) and math.isfinite(value):
            found[name] = float(value)
    return found


def flatten(body: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested tables, by their keys joined with dots."""
    for name, value in body.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def hide_config_secrets(value: Any, name: str = "") -> Any:
    """Returns a value of a configuration in which passwords and keys are hidden, in URLs and by the names of keys."""
    if isinstance(value, Mapping):
        return {key: hide_config_secrets(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [hide_config_secrets(each, name) for each in value]
    if isinstance(value, str):
        return _HIDDEN if is_secret_name(name) else hide_secrets(value)
    return value


def describe_value(value: Any) -> str:
    """Returns a value of a configuration as text."""
    return value if isinstance(value, str) else json.dumps(value)
