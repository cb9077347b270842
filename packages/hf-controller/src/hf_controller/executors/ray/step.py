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
    is_waiting, place = False, []
    while frame is not None:
        is_waiting = is_waiting or _COLLECTIVES in frame.f_code.co_filename
        place.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return Progress(False, hash(tuple(place)) if is_waiting else None)


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

    def await_peers(self, call: Call, timeout_s: float) -> None:
        """Wait until all peers have left it, or died, before ``call``.

        Raises:
            WorkerError: if all that have not wait in the same collectives of it for some seconds: for this rank.
            WorkerTimeoutError: if one does not leave it within ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        where = f"{call.role}.{call.method}: an earlier call {self.what} failed on this rank"
        again = "rebuild(executor, [pool]) builds the pool's groups again"
        wait_s, since_s, before = _FIRST_POLL_S, time.monotonic(), dict[int, int | None]()
        while inside := self._find_inside():
            if None in inside.values() or inside != before:
                before, since_s = inside, time.monotonic()
            if time.monotonic() - since_s > _STILL_S:
                raise WorkerError(f"{where}, and rank(s) {list(inside)} wait in its collective: out of step. {again}")
            if time.monotonic() >= deadline_s:
                raise WorkerTimeoutError(
                    f"{where}, and rank(s) {list(inside)} have not left it after {call.timeout_s:g} s: raise "
                    f"call_timeout_s, or {again}"
                )
            time.sleep(min(wait_s, max(0.0, deadline_s - time.monotonic())))
            wait_s = min(2 * wait_s, _POLL_S)

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
        self._waited_in_vain = False

    def leave(self, call: Call, peers: Sequence[int]) -> None:
        """It left ``call`` with a failure."""
        if peers:
            self._left.append(_Left(call.call_id, f"{call.role}.{call.method}", peers))

    def wait(self, call: Call) -> None:
        """Before ``call``: wait until all ranks have left the calls that failed here; raises what a wait raises.

        Calls that are queued behind one that waited in vain do not wait as long again.
        """
        while self._left:
            waited_in_vain, self._waited_in_vain = self._waited_in_vain, True
            self._left[0].await_peers(call, 0.0 if waited_in_vain else call.timeout_s)
            self._waited_in_vain = False
            del self._left[0]

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
