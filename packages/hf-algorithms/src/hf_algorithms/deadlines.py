"""The deadline of each call of a run, with the key that sets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_controller import Deadline

if TYPE_CHECKING:
    from hf_algorithms.config import Config

__all__ = ["evaluation_deadline", "list_deadlines"]

_LEAST_START_S = 120.0
_PHASES = {
    "generation": "generate",
    "probe_adapters": "generate",
    "score": "score",
    "inference": "logprobs",
    "training": "train",
    "load_model": "sync",
    "export_model": "checkpoint",
    "export_adapter": "checkpoint",
    "save_state": "checkpoint",
    "load_state": "checkpoint",
}
"""By a method's name, its kind, or the `phase` of its worker."""


def list_deadlines(config: Config) -> dict[str, Deadline]:
    """Returns what `hf_controller.RayExecutor` takes as `deadlines`."""
    given, default_s = config.deadlines, config.cluster.call_timeout_s
    start_s = given.start_s or max(default_s, _LEAST_START_S)
    return {
        "__init__": Deadline(start_s, "deadlines.start_s"),
        "*": Deadline(default_s, "cluster.call_timeout_s"),
        **{name: _deadline(config, phase) for name, phase in _PHASES.items()},
    }


def evaluation_deadline(config: Config) -> Deadline:
    """Returns the deadline of any call of an evaluation."""
    return _deadline(config, "evaluate")


def _deadline(config: Config, phase: str) -> Deadline:
    given: float | None = getattr(config.deadlines, f"{phase}_s")
    return Deadline(given or config.cluster.call_timeout_s, f"deadlines.{phase}_s")
