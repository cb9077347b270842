"""Commits with the best validation scores, which `run.keep_best` keeps in addition to the newest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

__all__ = ["BestCommits"]


class BestCommits:
    """Scores of the commits that are kept for their score.

    Args:
        keep: how many; 0 for none.
        lower_is_better: the metric falls as the model improves.
    """

    def __init__(self, keep: int, *, lower_is_better: bool = False) -> None:
        self._keep = keep
        self._sign = -1.0 if lower_is_better else 1.0
        self._scores: dict[int, float] = {}

    @property
    def scores(self) -> dict[str, float]:
        """Scores by iteration, as a commit stores them."""
        return {str(iteration): self._scores[iteration] for iteration in self.iterations}

    @property
    def iterations(self) -> list[int]:
        """Iterations of the commits, the best first; of equal scores the earlier one."""
        return sorted(self._scores, key=lambda each: (-self._sign * self._scores[each], each))

    def restore(self, scores: Mapping[str, float], present: Collection[int]) -> None:
        """Takes over the scores of a commit, as far as their commits are still there."""
        known = {int(iteration): score for iteration, score in scores.items()}
        for iteration in sorted(known.keys() & set(present)):
            self.add(iteration, known[iteration])

    def is_better(self, score: float | None) -> bool:
        """Returns True if a commit with this score would be kept; None: the iteration was not evaluated."""
        if self._keep == 0 or score is None or not math.isfinite(score):
            return False
        if len(self._scores) < self._keep:
            return True
        worst = self._scores[self.iterations[-1]]
        return self._sign * score > self._sign * worst

    def add(self, iteration: int, score: float | None) -> bool:
        """Takes a commit if its score is good enough; returns True if so. The worst one makes room."""
        if score is None or not self.is_better(score):
            return False
        self._scores[iteration] = score
        for dropped in self.iterations[self._keep :]:
            del self._scores[dropped]
        return True
