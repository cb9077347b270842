"""One rank's process as the controller sees it: how to reach it, where it is, what it was told last."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError, RayTaskError

from hf_controller.executors.ray.inquirer import Inquirer
from hf_controller.failures import Failure

__all__ = [
    "HostProcess",
    "Location",
    "describe_death",
    "describe_processes",
    "find_location",
    "find_maker",
    "in_one_line",
    "own_origin",
]


class Location(NamedTuple):
    """Where a process is."""

    pid: int
    address: str
    host: str
    log: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.address} ({self.host})" + (f", log {self.log}" if self.log else "")


def find_location() -> Location:
    """Where this process is; its log is the file that its standard error goes to."""
    address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    try:
        log = os.readlink("/proc/self/fd/2")
    except OSError:
        log = ""
    return Location(os.getpid(), address, socket.gethostname(), log)


class HostProcess:
    """One rank's process.

    Args:
        label: its roles and rank, such as ``"actor+critic/0"``.
        pool: name of its pool.
        actor: its actor.

    Attributes:
        origin: what its death is called as a :class:`Failure`'s origin.
        last_call: the call that it was given last, such as ``"call 12 actor.update_actor"``.
        last_answer: reference of its answer, or None. It is there once all calls are over: a process runs them in
            order, those too whose inputs are lost.
        was_ended: whether its pool was released, or its group ended.
        was_killed: whether it lived until then, as far as is known.
    """

    def __init__(self, label: str, pool: str, actor: Any) -> None:
        self.label = label
        self.pool = pool
        self.actor = actor
        self.origin = _origin_of(actor._actor_id.hex())
        self.last_call = "none"
        self.last_answer: Any = None
        self.was_ended = False
        self.was_killed = False
        self._is_gone = False
        # Asked now: a dead process, or one that stands still, could not answer later.
        self._location = actor.locate.remote()

    def note_call(self, call: str, answer: Any) -> None:
        """It is given ``call``, unless it is known to be gone."""
        if not self._is_gone:
            self.last_call, self.last_answer = call, answer

    def note_death(self, error: RayError) -> None:
        """It is gone, unless Ray says that it may come back: what it was given last stays what it is."""
        self._is_gone = self._is_gone or not isinstance(error, ActorUnavailableError)

    @property
    def was_lost(self) -> bool:
        """True if the process is known to have ended by itself."""
        return self._is_gone and not self.was_killed

    def end(self) -> None:
        """Kill it."""
        self.was_ended, self.was_killed = True, not self._is_gone
        ray.kill(self.actor)

    def find_location(self) -> Location | None:
        """Where it is, if it ever said so."""
        try:
            location: Location = ray.get(self._location, timeout=0)
        except RayError:
            return None
        return location

    def describe_location(self) -> str:
        """Where it is, as far as it ever said."""
        return str(self.find_location() or "a process that never started")


def describe_death(
    error: RayError, process: HostProcess, *, role: str, method: str, rank: int, others: Sequence[HostProcess] = ()
) -> Failure:
    """What became of ``role.method`` on ``rank``, because ``process`` is gone, and ``others`` with it.

    An error that Ray raised inside a process that lives is described as its cause.
    """
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
    origin = ""
    if isinstance(cause, RayActorError):
        origin = _origin_of(cause.actor_id)
        message = (
            f"an earlier call's result is lost with its process: {in_one_line(cause)}; a pool that was released takes "
            "the results of its unfinished calls along"
        )
    elif cause is not None:
        message = str(cause)
    else:
        process.note_death(error)
        also = f"; gone as well: {', '.join(other.label for other in others)}" if others else ""
        where = f"it was given last: {process.last_call}; it was {process.describe_location()}"
        message = f"process {process.label} is gone: {in_one_line(error)} ({where}){also}"
        if process.was_killed:
            message += f"; its pool {process.pool!r} was released: ask for results before"
        elif process.was_ended:
            message += "; its group was ended since"
        elif method != "__init__":  # else its pool's groups never stood, and a note says what to do
            pools = ", ".join(dict.fromkeys(repr(each.pool) for each in (process, *others)))
            message += f"; rebuild(executor, [pool]) builds the groups of pool {pools} again"
        origin = process.origin
    return Failure(
        role=role,
        method=method,
        rank=rank,
        cause_type=type(cause or error).__name__,
        message=message,
        remote_traceback="" if cause is None else str(error),
        origin=origin,
    )


def find_maker(error: RayError) -> str:
    """The process that made what is lost, as a :class:`Failure`'s origin; nothing where Ray does not say."""
    cause = getattr(error, "cause", error) if isinstance(error, RayTaskError) else error
    actor_id = getattr(cause, "actor_id", None)
    if isinstance(cause, ObjectLostError):
        # An object's id contains that of the actor that made it.
        actor_id = ray.ObjectRef(bytes.fromhex(cause.object_ref_hex)).task_id().actor_id().hex()
    return _origin_of(actor_id) if actor_id else ""


def own_origin() -> str:
    """What the controller calls this process as a :class:`Failure`'s origin."""
    return _origin_of(ray.get_runtime_context().get_actor_id())


def _origin_of(actor_id: str | None) -> str:
    return f"process {actor_id}"


def in_one_line(error: RayError) -> str:
    """Its text, whose lines Ray breaks."""
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def describe_processes(processes: Mapping[int, HostProcess], inquirer: Inquirer, timeout_s: float) -> dict[int, str]:
    """What each rank is at, where it is, and its stack.

    Of a rank that is not there, or does not answer in time, the last call and the place where its stack can be had.
    """
    answers = inquirer.ask([process.actor for process in processes.values()], "describe", timeout_s)
    return {
        rank: _describe(process, answer) for (rank, process), answer in zip(processes.items(), answers, strict=True)
    }


def _describe(process: HostProcess, answer: Any) -> str:
    where = process.describe_location()
    if isinstance(answer, RayError):
        if process.find_location() is None:
            where = "it never started: its slot is gone, or Ray cannot start a process there"
        else:
            where = f"for its stack see {where}"
        return f"no answer ({type(answer).__name__}); given last: {process.last_call}; {where}"
    stage, stack = answer
    if process.last_call != "none" and not stage.startswith(f"{process.last_call}:"):
        why = "waiting for the inputs of" if "idle for" in stage else "has not begun"
        stage = f"{stage}; {why} {process.last_call}"
    if "idle for" in stage:
        stack = ""  # an idle process is in Ray's own loop
    return f"{stage}; {where}\n{stack.rstrip()}".rstrip()
