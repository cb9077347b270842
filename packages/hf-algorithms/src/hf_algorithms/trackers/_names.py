"""Names of trackers, and their classes, which are imported when a run asks for them."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Sequence

from hf_algorithms.trackers._tracker import Tracker
from hf_protocols.errors import ConfigError
from hf_protocols.foreign_code import Caught
from hf_protocols.similar_names import find_similar
from hf_protocols.validation import show

__all__ = ["TRACKERS", "check_names", "load_tracker"]

TRACKERS = {
    "tensorboard": "hf_algorithms.trackers._tensorboard:TensorBoardTracker",
    "wandb": "hf_algorithms.trackers._wandb:WandbTracker",
    "mlflow": "hf_algorithms.trackers._mlflow:MlflowTracker",
    "trackio": "hf_algorithms.trackers._trackio:TrackioTracker",
}
"""Class of every tracker, by the name that `run.trackers` takes; an extra of hf-algorithms has the same name."""

_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
"""Variables that keep libraries from reporting how they are used; a user's own values stay."""


def check_names(names: Sequence[str]) -> None:
    """Refuses unknown trackers, and one that is named twice.

    Raises:
        ValueError: with the nearest known name.
    """
    for number, name in enumerate(names):
        if name not in TRACKERS:
            near = find_similar(name, TRACKERS)
            hint = f"Did you mean {show(near[0])}?" if near else f"Use {', '.join(TRACKERS)}"
            raise ValueError(f"{show(name)} is not a tracker. {hint}")
        if name in names[:number]:
            raise ValueError(f"{show(name)} is named twice. Remove one")


def load_tracker(name: str) -> Tracker:
    """Imports a tracker with its library.

    Raises:
        ConfigError: for a library that is absent or cannot be loaded, with the line that installs it.
    """
    module, _, kind = TRACKERS[name].partition(":")
    install = f"pip install 'hf-algorithms[{name}]'"
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    with Caught() as caught:  # libraries whose versions do not fit each other raise anything
        return getattr(importlib.import_module(module), kind)()  # type: ignore[no-any-return]
    if isinstance(caught.error, ImportError) and not _is_installed(name):
        raise ConfigError(f"run.trackers: {name} is not installed. Install it: {install}")
    found = f"{type(caught.error).__name__}: {caught.error}"
    raise ConfigError(f"run.trackers: {name} cannot be loaded: {found}. Install it again: {install}") from caught.error


def _is_installed(distribution: str) -> bool:
    """A folder of runs in the current directory may have a library's name, so that to import it proves nothing."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
