"""`save_state`, `finish_state` and `load_state` of a training backend that says which tensors it keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hf_engine.training.state import LoadedState, StateFile
from hf_engine.training.state.loading import load_parts
from hf_engine.training.state.parts import StateParts, StateProgress
from hf_engine.training.state.saving import StateWriter
from hf_protocols.errors import StateError
from hf_protocols.validation import Checks

if TYPE_CHECKING:
    import torch.distributed as dist

    from hf_engine.training.learning_rate import LearningRate

__all__ = ["KeepsState"]

_check = Checks(StateError)


class _Optimizer(Protocol):
    learning_rate: LearningRate
    steps: int

    def continue_from(self, steps: int) -> None: ...


class KeepsState(ABC):
    """A training backend whose state can be saved and loaded.

    Args:
        group: all its ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._weight_changes = 0
        self._state_group = group
        self._states = StateWriter(group)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken, those of a loaded state included."""
        optimizer = self._state_optimizer()
        return 0 if optimizer is None else optimizer.steps

    @property
    def weight_changes(self) -> int:
        """Grows with every optimizer step and every load."""
        return self._weight_changes

    def save_state(
        self, directory: str | Path, *, background: bool = False, weight_version: int = 0, apart: bool = False
    ) -> None:
        """Writes weights, optimizer state and random numbers; see `TrainBackend.save_state`."""
        _check.count("weight_version", weight_version, least=0)
        if apart and background:
            raise StateError("save_state: background and apart exclude each other. Leave out one of them")
        parts, optimizer = self._state_parts("save_state"), self._state_optimizer()
        progress = StateProgress(
            optimizer_steps=0 if optimizer is None else optimizer.steps,
            weight_changes=self._weight_changes,
            weight_version=weight_version,
            learning_rate=None if optimizer is None else optimizer.learning_rate.given,
        )
        writer = StateWriter(self._state_group) if apart else self._states
        writer.save(directory, parts, progress, background=background)

    def finish_state(self, timeout_s: float | None = None) -> tuple[StateFile, ...]:
        """Waits for what `save_state` writes; see `TrainBackend.finish_state`."""
        if timeout_s is not None:
            _check.seconds("timeout_s", timeout_s)
        return self._states.finish(timeout_s)

    def load_state(self, directory: str | Path, *, files: Sequence[StateFile] | None = None) -> LoadedState:
        """Continues from a saved state; see `TrainBackend.load_state`."""
        parts = self._state_parts("load_state")
        loaded, progress = load_parts(directory, parts, self._state_group, files=files, before=self._note_change)
        self._weight_changes = max(self._weight_changes, progress.weight_changes)
        if (optimizer := self._state_optimizer()) is not None:
            optimizer.continue_from(progress.optimizer_steps)
            optimizer.learning_rate.given = progress.learning_rate
        return loaded

    def _note_change(self) -> None:
        self._weight_changes += 1  # also where reading fails on the way

    @abstractmethod
    def _state_parts(self, method: str) -> StateParts:
        """The live tensors, unless any of them is offloaded. Collective."""

    @abstractmethod
    def _state_optimizer(self) -> _Optimizer | None: ...
