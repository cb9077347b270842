"""Cadence of a run's commits: by iterations, by seconds, or by their cost."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Cadence"]

_SHARE = 0.05
"""Of the time, for `auto`."""
_FIRST_COST_S = 1.0
"""Expected of the first commit."""


class Cadence:
    """Decides after each iteration, by `run.checkpoint_every`.

    Args:
        every: iterations, 0 for never; seconds such as `"60s"`; or `"auto"`, as often as costs 5 % of the time.
        clock: seconds that only grow.
    """

    def __init__(self, every: int | str, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._clock = clock
        self._started_s = self._last_s = clock()
        self._cost_s = _FIRST_COST_S
        self.spent_s = 0.0
        """Seconds for which commits have held up the run."""

    def is_due(self, iteration: int, *, is_last: bool = False) -> bool:
        """Returns True if the run commits after this iteration; after its last one it does, unless it never does."""
        if self._every == 0:
            return False
        if is_last:
            return True
        if isinstance(self._every, int):
            return iteration % self._every == 0
        if self._every == "auto":
            return self.spent_s + self._cost_s <= _SHARE * (self._clock() - self._started_s)
        return self._clock() - self._last_s >= float(self._every.removesuffix("s"))

    def note_commit(self, seconds: float) -> None:
        """Takes for how long a commit has held up the run."""
        self._last_s = self._clock()
        self._cost_s = seconds
        self.spent_s += seconds

    def note_wait(self, seconds: float) -> None:
        """Takes for how long the run has waited for a commit to be written."""
        self._cost_s += seconds
        self.spent_s += seconds

    @property
    def share(self) -> float:
        """Share of the time since the start that commits have held up the run."""
        return self.spent_s / max(self._clock() - self._started_s, 1e-9)
