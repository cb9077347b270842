"""The deadline of each call of a run, with the key that sets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_controller import Deadline

if TYPE_CHECKING:
    from hf_algorithms.config import Config

__all__ = ["evaluation_deadline", "list_deadlines"]

_LEAST_START_S = 120.0
_PHASES = {
    "generation": "generate_s",
    "probe_adapters": "generate_s",
    "score": "score_s",
    "inference": "logprobs_s",
    "training": "train_s",
    "load_model": "sync_s",
    "export_model": "checkpoint_s",
    "export_adapter": "checkpoint_s",
    "save_state": "checkpoint_s",
    "finish_state": "checkpoint_s",
    "load_state": "checkpoint_s",
}
"""By a method's name, its kind, or the `phase` of its worker."""


def list_deadlines(config: Config) -> dict[str, Deadline]:
    """Returns what `hf_controller.RayExecutor` takes as `deadlines`."""
    given, default_s = config.deadlines, config.cluster.call_timeout_s
    start_s = given.start_s or max(default_s, _LEAST_START_S)
    return {
        "__init__": Deadline(start_s, "deadlines.start_s"),
        "*": Deadline(default_s, "cluster.call_timeout_s"),
        **{name: _deadline(config, key) for name, key in _PHASES.items()},
    }


def evaluation_deadline(config: Config) -> Deadline:
    """Returns the deadline of any call of an evaluation."""
    return _deadline(config, "evaluate_s")


def _deadline(config: Config, key: str) -> Deadline:
    given: float | None = getattr(config.deadlines, key)
    return Deadline(given or config.cluster.call_timeout_s, f"deadlines.{key}")
