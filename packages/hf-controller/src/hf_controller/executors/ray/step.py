"""Keeping the ranks of a group in step: who failed in a call waits until the others are out of it.

A rank that goes on while another is still in a collective of the call that failed would meet it there with the next
call's tensors, and both would go on with wrong numbers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, RayError

from hf_controller.dispatch import Call
from hf_protocols import WorkerError, WorkerTimeoutError

__all__ = ["Progress", "Step", "describe_progress"]

_COLLECTIVES = os.sep + os.path.join("torch", "distributed", "")
_FIRST_POLL_S = 0.02
_POLL_S = 1.0
_STILL_S = 5.0
_ANSWER_TIMEOUT_S = 5.0


class Progress(NamedTuple):
    """How far a rank is with a call: out of it, or where it waits inside of torch.distributed, if it does there."""

    has_left: bool
    waits_at: int | None = None


def describe_progress(thread: int | None) -> Progress:
    """Where a thread is that runs a method."""
    frame: FrameType | None = sys._current_frames().get(thread or -1)
    is_waiting, place = False, list[tuple[int, int]]()
    while frame is not None:
        is_waiting = is_waiting or _COLLECTIVES in frame.f_code.co_filename
        place.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    if thread is None or not is_waiting:
        return Progress(False)
    # Who waits spends no time; a loop over collectives is found at the same place again and again.
    spent_ns = time.clock_gettime_ns(time.pthread_getcpuclockid(thread))
    return Progress(False, hash((spent_ns, *place)))


class _Refusal(NamedTuple):
    """Why a call may not run, and as which error."""

    error: type[WorkerError]
    reason: str


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

    def await_peers(self, timeout_s: float) -> _Refusal | None:
        """Wait until all peers have left it, or died. Else, after ``timeout_s`` at most, why the next call may not run:
        all that have not left it wait in the same collectives of it for some seconds, for this rank; or are not done.
        """
        deadline_s = time.monotonic() + timeout_s
        wait_s, since_s, before = _FIRST_POLL_S, time.monotonic(), dict[int, int | None]()
        while inside := self._find_inside():
            if None in inside.values() or inside != before:
                before, since_s = inside, time.monotonic()
            if time.monotonic() - since_s > _STILL_S:
                return _Refusal(WorkerError, f"rank(s) {list(inside)} wait in its collective: out of step")
            if time.monotonic() >= deadline_s:
                late = f"rank(s) {list(inside)} have not left it after {timeout_s:g} s (call_timeout_s)"
                return _Refusal(WorkerTimeoutError, late)
            time.sleep(min(wait_s, max(0.0, deadline_s - time.monotonic())))
            wait_s = min(2 * wait_s, _POLL_S)
        return None

    def _find_inside(self) -> dict[int, int | None]:
        """The peers that have not left it, and where each waits; one that is gone has left."""
        name = str(ray.get_runtime_context().get_actor_name()).rpartition("-")[0]
        asked = {rank: _ask(f"{name}-{rank}", self.call_id) for rank in self.peers}
        pending = [answer for answer in asked.values() if answer is not None]
        if pending:
            ray.wait(pending, num_returns=len(pending), timeout=_ANSWER_TIMEOUT_S)
        found = {rank: _read(answer) for rank, answer in asked.items() if answer is not None}
        return {rank: progress.waits_at for rank, progress in found.items() if not progress.has_left}


class Step:
    """The calls that this rank left with a failure, and in which others may still be."""

    def __init__(self) -> None:
        self._left: list[_Left] = []
        self._refusal: _Refusal | None = None
        self._refused_s = 0.0

    def leave(self, call: Call, peers: Sequence[int]) -> None:
        """It left ``call`` with a failure."""
        if peers:
            self._left.append(_Left(call.call_id, f"{call.role}.{call.method}", peers))

    def wait(self, call: Call) -> None:
        """Before ``call``: wait until all ranks have left the calls that failed here.

        Calls that were queued behind one that waited in vain do not wait as long again, and are told the same.

        Raises:
            WorkerError: if the others wait for this rank in a collective that it will not join any more.
            WorkerTimeoutError: if they have not left within the call's ``timeout_s``.
        """
        while self._left:
            was_queued = self._refusal is not None and call.submit_s < self._refused_s
            refusal = self._left[0].await_peers(0.0 if was_queued else call.timeout_s)
            if refusal is None:
                del self._left[0]
                continue
            if self._refusal is None or not was_queued:
                self._refusal, self._refused_s = refusal, time.time()
            raise self._refusal.error(
                f"{call.role}.{call.method}: an earlier call {self._left[0].what} failed on this rank, and "
                f"{self._refusal.reason}. rebuild(executor, [pool]) builds the pool's groups again"
            )
        self._refusal = None

    def is_behind(self) -> bool:
        """Whether there is something to wait for."""
        return bool(self._left)


def _ask(name: str, call_id: int) -> Any:
    """Reference of a peer's answer; None for one that is gone."""
    try:
        return ray.get_actor(name).progress.remote(call_id)
    except ValueError:
        return None


def _read(answer: Any) -> Progress:
    try:
        progress: Progress = ray.get(answer, timeout=0)
    except ActorDiedError:
        return Progress(True)
    except RayError:
        return Progress(False)  # it stands still, or cannot be reached
    return progress
