"""The learning rate of every optimizer step: warm-up, then a schedule. Pure."""

from __future__ import annotations

from math import cos, pi

from hf_engine.backends.base import TrainConfig
from hf_protocols.errors import BackendError
from hf_protocols.validation import Checks

__all__ = ["LearningRate"]

_check = Checks(BackendError)


class LearningRate:
    """The rate that a `TrainConfig` gives every step: a function of the step's number, so a resumed run continues it.

    After the warm-up the rate is that of transformers' `get_scheduler`, up to `total_steps`. After `total_steps` it
    stays at its floor, where transformers' cosine rises again. In the warm-up it is one step ahead of transformers, so
    that the first step already moves the weights.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.given: tuple[float, bool] | None = None
        """Arguments of the last call of `set`; None for the configured rate."""

    def set(self, learning_rate: float, *, constant: bool = False) -> None:
        """Uses another full rate, of which the warm-up takes its share, and so does the schedule unless it is
        `constant`.
        """
        _check.number("learning_rate", learning_rate, may_be_zero=True)
        self.given = (learning_rate, constant)

    def reset(self) -> None:
        """Uses the configured rate and schedule again."""
        self.given = None

    def at(self, step: int) -> float:
        """The rate of step number `step`, counted from 0."""
        config = self._config
        whole, is_constant = self.given or (config.learning_rate, False)
        if step < config.warmup_steps:
            return whole * (step + 1) / config.warmup_steps
        if config.schedule == "constant" or is_constant:
            return whole
        done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
        left = 1.0 - done if config.schedule == "linear" else (1.0 + cos(pi * done)) / 2
        return whole * (config.floor + (1.0 - config.floor) * left)
