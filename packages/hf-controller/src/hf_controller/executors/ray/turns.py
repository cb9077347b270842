"""Whose turn it is where several processes share a slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

__all__ = ["CallQueue", "find_unfinished"]

_MOST_ANSWERS = 8


class CallQueue:
    """The calls that one process has still to run, as a few answers that are all there once the calls are over.

    A process runs its calls in order, so the last answer stands for the earlier ones. It does not where Ray may answer
    for the process: a call to which Ray brings another's result fails before its turn if that is lost.

    Args:
        actor: the process's actor.

    Attributes:
        answers: the answers.
    """

    def __init__(self, actor: Any) -> None:
        self.answers: list[Any] = []
        self._actor = actor

    def add(self, answer: Any, *, may_fail_early: bool) -> None:
        """Note the process's next call."""
        if not may_fail_early:
            self.answers = [answer]
            return
        self.answers.append(answer)
        if len(self.answers) > _MOST_ANSWERS:
            self.answers = find_unfinished(self.answers)
        if len(self.answers) > _MOST_ANSWERS:
            # What later calls wait for must not grow with the calls that are queued.
            self.answers = [self._actor.finish_calls.remote()]


def find_unfinished(answers: Sequence[Any]) -> list[Any]:
    """Those of the answers that are not there."""
    return list(ray.wait(list(answers), num_returns=len(answers), timeout=0, fetch_local=False)[1]) if answers else []
