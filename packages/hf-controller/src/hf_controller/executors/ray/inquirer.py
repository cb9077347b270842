"""Asks processes for their state while they run calls.

Ray holds back every later request of one caller to an actor while an earlier one waits for its arguments, so questions
come from a process of their own. It is started when the first question is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["Inquirer"]

_START_TIMEOUT_S = 20.0


class Inquirer:
    """Questions to the actors of rank processes."""

    def __init__(self) -> None:
        self._asker: Any = None

    def ask(self, actors: Sequence[Any], question: str, timeout_s: float) -> list[Any]:
        """Every actor's answer to a method of the concurrency group `service`, or the RayError in its place."""
        if self._asker is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            asker: Any = ray.remote(_Asker)
            self._asker = asker.options(num_cpus=0, scheduling_strategy=here).remote()
        try:
            reply = self._asker.ask.remote(list(actors), question, timeout_s)
            return list(ray.get(reply, timeout=_START_TIMEOUT_S + timeout_s))
        except RayError as error:
            # Nobody could be asked: that says nothing about the processes. The next question starts another asker.
            self._asker = None
            return [GetTimeoutError(str(error))] * len(actors)


class _Asker:
    """The other process."""

    def ask(self, actors: Sequence[Any], question: str, timeout_s: float) -> list[Any]:
        asked = [getattr(actor, question).remote() for actor in actors]
        ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
        return [_answer(reply) for reply in asked]


def _answer(reply: Any) -> Any:
    try:
        return ray.get(reply, timeout=0)
    except RayError as error:
        return error
