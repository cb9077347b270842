"""Waiting on the controller: in slices, so that signals are seen, with a deadline; and questions while calls run.

Ray holds back every later request of one caller to an actor while an earlier one waits for its arguments, so questions
come from a process of their own. It is started when the first question is asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hf_controller.failures import CLOSED
from hf_controller.signals import SignalGuard
from hf_protocols import PoolError

__all__ = ["Probe", "Waiter"]

# Ray looks for signals once a second, and loses some of the exceptions that their handlers raise.
_SLICE_S = 0.2
_START_TIMEOUT_S = 20.0


class Waiter:
    """Waits for Ray objects.

    Args:
        guard: knows of signals that arrive meanwhile.
    """

    def __init__(self, guard: SignalGuard) -> None:
        self._guard = guard
        self._closed = False

    def close(self) -> None:
        """Refuses everything from now on: Ray would start a cluster, or join one that runs here, to serve it."""
        self._closed = True

    def get_all(self, handles: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Returns the values if all are available within a moment, else []; most calls need no second request."""
        self.check_open()
        with self._guard.watching():
            try:
                return list(ray.get(list(handles), timeout=_SLICE_S if timeout_s is None else min(_SLICE_S, timeout_s)))
            except RayError:
                pass
        return []

    def wait_slice(self, handles: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """The handles that are ready once all are, or a moment has passed."""
        self.check_open()
        slice_s = _SLICE_S if timeout_s is None else max(0.0, min(_SLICE_S, timeout_s))
        with self._guard.watching():
            if not handles:
                time.sleep(slice_s)
                return []
            return list(ray.wait(list(handles), num_returns=len(handles), timeout=slice_s)[0])

    def check_open(self) -> None:
        """Refuses to go on after `close`."""
        if self._closed:
            raise PoolError(CLOSED)


class Probe:
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
