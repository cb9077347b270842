"""Keeping the ranks of a group in step: who failed in a call waits until the others are out of it.

A rank that goes on while another is still in a collective of the call that failed would meet it there with the next
call's tensors, and both would go on with wrong numbers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, RayError

from hf_controller.dispatch import Call
from hf_protocols import WorkerError, WorkerTimeoutError

__all__ = ["LEFT", "Step", "describe_progress"]

LEFT, _IN_METHOD, _IN_COLLECTIVE = "left", "in the method", "in a collective"
_COLLECTIVES = ("distributed_c10d", "_functional_collectives")
_POLL_S = 0.02
_SLOW_POLL_S = 1.0
_ANSWER_TIMEOUT_S = 5.0


def describe_progress(thread: int | None) -> str:
    """Whether a thread that runs a method is in a collective of torch's."""
    frame: FrameType | None = sys._current_frames().get(thread or -1)
    while frame is not None:
        if any(module in frame.f_code.co_filename for module in _COLLECTIVES):
            return _IN_COLLECTIVE
        frame = frame.f_back
    return _IN_METHOD


class _Left(NamedTuple):
    """A call that this rank left with a failure.

    Attributes:
        call_id: its number.
        what: its role and method.
        peers: the other called ranks.
    """

    call_id: int
    what: str
    peers: Sequence[int]

    def await_peers(self, call: Call) -> None:
        """Wait until all peers have left it, or died, before ``call``.

        Raises:
            WorkerError: if one stays in a collective of it, which this rank will not join any more.
            WorkerTimeoutError: if one does not leave it within the call's ``timeout_s``.
        """
        deadline_s = time.monotonic() + call.timeout_s
        stuck: set[int] = set()
        wait_s = _POLL_S
        while True:
            progress = self._ask_peers()
            inside = [rank for rank, at in progress.items() if at != LEFT]
            if not inside:
                return
            waiting = {rank for rank in inside if progress[rank] == _IN_COLLECTIVE}
            alone = sorted(waiting & stuck)
            where = f"{call.role}.{call.method}: an earlier call {self.what} failed on this rank"
            again = "rebuild(executor, [pool]) builds the pool's groups again"
            if alone:
                raise WorkerError(f"{where}, and rank(s) {alone} wait for it in a collective: out of step. {again}")
            if time.monotonic() > deadline_s:
                raise WorkerTimeoutError(
                    f"{where}, and rank(s) {inside} have not left it after {call.timeout_s:g} s: raise "
                    f"call_timeout_s, or {again}"
                )
            time.sleep(min(wait_s, call.timeout_s))
            if wait_s == _SLOW_POLL_S:
                stuck = waiting
            wait_s = min(2 * wait_s, _SLOW_POLL_S)

    def _ask_peers(self) -> dict[int, str]:
        """How far each peer is; one that is gone has left."""
        name = str(ray.get_runtime_context().get_actor_name()).rpartition("-")[0]
        return {rank: _ask(f"{name}-{rank}", self.call_id) for rank in self.peers}


class Step:
    """The calls that this rank left with a failure, and in which others may still be."""

    def __init__(self) -> None:
        self._left: list[_Left] = []

    def leave(self, call: Call, peers: Sequence[int]) -> None:
        """It left ``call`` with a failure."""
        if peers:
            self._left.append(_Left(call.call_id, f"{call.role}.{call.method}", peers))

    def wait(self, call: Call) -> None:
        """Before ``call``: wait until all ranks have left the calls that failed here; raises what a wait raises."""
        while self._left:
            self._left[0].await_peers(call)
            del self._left[0]

    def is_behind(self) -> bool:
        """Whether there is something to wait for."""
        return bool(self._left)


def _ask(name: str, call_id: int) -> str:
    try:
        peer: Any = ray.get_actor(name)
        progress: str = ray.get(peer.progress.remote(call_id), timeout=_ANSWER_TIMEOUT_S)
    except (ActorDiedError, ValueError):
        return LEFT
    except RayError:
        return _IN_METHOD  # it stands still, or cannot be reached
    return progress
