"""Keeping the ranks of a group in step: who failed in a call waits until the others are out of it.

A rank that goes on while another is still in a collective of the call that failed would meet it there with the next
call's tensors, and both would go on with wrong numbers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, RayError

from hf_controller.dispatch import Call
from hf_protocols import WorkerError, WorkerTimeoutError

__all__ = ["Progress", "Step", "describe_progress"]

_DISTRIBUTED = os.sep + os.path.join("torch", "distributed", "")
_NO_COLLECTIVES = _DISTRIBUTED + os.path.join("checkpoint", "")
_DISPATCHER = os.sep + os.path.join("torch", "_ops.py")
_FIRST_POLL_S = 0.02
_POLL_S = 1.0
_STILL_S = 8.0
_ANSWER_TIMEOUT_S = 5.0


class Progress(NamedTuple):
    """How far a rank is with a call: out of it, or where it waits inside of torch.distributed, if it does there."""

    has_left: bool
    waits_at: int | None = None


def describe_progress(thread: int | None) -> Progress:
    """Where a thread is that runs a method. What torch.distributed calls, such as a model's forward, is not waiting."""
    frame = sys._current_frames().get(thread or -1)
    while frame is not None and frame.f_code.co_filename.endswith(_DISPATCHER):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    if thread is None or _DISTRIBUTED not in file or _NO_COLLECTIVES in file:
        return Progress(False)
    place = list[tuple[int, int]]()
    while frame is not None:
        place.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    # Who waits spends no time; a loop over collectives is found at the same place again and again. A large collective
    # is computed by threads of gloo's, which the clock of the whole process sees.
    spent_ns = time.clock_gettime_ns(time.pthread_getcpuclockid(thread))
    return Progress(False, hash((spent_ns, int(time.process_time()), *place)))


@dataclass
class _Left:
    """A call that this rank left with a failure.

    Attributes:
        call_id: its number.
        what: its role and method.
        peers: the other called ranks.
        standing: where the peers stood that had not left it when a later call was refused.
    """

    call_id: int
    what: str
    peers: Sequence[int]
    standing: Mapping[int, int | None] = field(default_factory=dict)

    def await_peers(self, call: Call) -> None:
        """Wait until all peers have left it, or died.

        Raises:
            WorkerError: if all that have not left it wait in its collectives for some seconds, for this rank.
            WorkerTimeoutError: if they are not done within the ``timeout_s`` of ``call``.
        """
        deadline_s = time.monotonic() + call.timeout_s
        wait_s, since_s, before = _FIRST_POLL_S, time.monotonic(), dict[int, int | None]()
        while inside := self._find_inside():
            ranks = f"rank(s) {list(inside)}"
            if None in inside.values() or inside != before:
                before, since_s = inside, time.monotonic()
            if time.monotonic() - since_s > _STILL_S or (inside == self.standing and None not in inside.values()):
                self.standing = inside  # for the calls that are queued behind this one
                raise WorkerError(self._describe(call, f"{ranks} wait in its collective: out of step"))
            if time.monotonic() >= deadline_s:
                late = f"{ranks} have not left it after {call.timeout_s:g} s (call_timeout_s)"
                raise WorkerTimeoutError(self._describe(call, late))
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

    def _describe(self, call: Call, reason: str) -> str:
        return (
            f"{call.role}.{call.method}: an earlier call {self.what} failed on this rank, and {reason}. "
            "rebuild(executor, [pool]) builds the pool's groups again"
        )


class Step:
    """The calls that this rank left with a failure, and in which others may still be."""

    def __init__(self) -> None:
        self._left: list[_Left] = []

    def leave(self, call: Call, peers: Sequence[int]) -> None:
        """It left ``call`` with a failure."""
        if peers:
            self._left.append(_Left(call.call_id, f"{call.role}.{call.method}", peers))

    def wait(self, call: Call) -> None:
        """Before ``call``: wait until all ranks have left the calls that failed here.

        Raises:
            WorkerError: if the others wait for this rank in a collective that it will not join any more.
            WorkerTimeoutError: if they have not left within the call's ``timeout_s``.
        """
        while self._left:
            self._left[0].await_peers(call)
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
