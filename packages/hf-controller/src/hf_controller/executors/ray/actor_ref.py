"""One rank's process as the controller sees it: its actor, its place and the last call that it got."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayError, RayTaskError

from hf_controller.executors.ray.process_end import ProcessEnd, ProcessWatch
from hf_controller.executors.ray.ray_internals import find_actor_id
from hf_controller.executors.ray.waiting import Probe
from hf_controller.failures import Failure

__all__ = [
    "DEATH_IS_KNOWN_S",
    "ActorRef",
    "Location",
    "describe_death",
    "describe_processes",
    "find_dead",
    "find_location",
    "find_maker",
    "in_one_line",
    "own_origin",
]

_LOST = (ActorDiedError, ActorUnavailableError)
DEATH_IS_KNOWN_S = 20.0
"""Longest delay with which Ray reports the end of a process on another machine, counted from its effect on others."""


class Location(NamedTuple):
    """Machine, process id and log of a process."""

    pid: int
    address: str
    host: str
    log: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.address} ({self.host})" + (f", log {self.log}" if self.log else "")


def find_location() -> Location:
    """Returns the location of this process; its log is the file that its standard error goes to."""
    address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    try:
        log = os.readlink("/proc/self/fd/2")
    except OSError:
        log = ""
    return Location(os.getpid(), address, socket.gethostname(), log)


class ActorRef:
    """One rank's process.

    Args:
        name: its roles, such as `"actor+critic"`.
        rank: its rank.
        pool: name of its pool.
        actor: its actor.
        is_here: whether it runs on this machine.

    Attributes:
        label: its roles and rank, such as `"actor+critic/0"`.
        origin: what its death is called as a `Failure`'s origin.
        last_call: the call that it was given last, such as `"call 12 actor.update_actor"`.
        last_answer: reference of its answer, or None. It is there once all calls are over: a process runs them in
            order, those too whose inputs are lost.
        was_ended: whether its pool was released, or its group ended.
        is_gone: whether it ended by itself, as far as is known.
    """

    def __init__(self, name: str, rank: int, pool: str, actor: Any, *, is_here: bool) -> None:
        self.label = f"{name}/{rank}"
        self.rank = rank
        self.pool = pool
        self.actor = actor
        self.origin = _origin_of(find_actor_id(actor))
        self.last_call = "none"
        self.last_answer: Any = None
        self.was_ended = False
        self.is_gone = False
        self._is_here = is_here
        self._watch: ProcessWatch | None = None
        # Requested now: a process that is dead or stopped could not answer later.
        self._location = actor.locate.remote()

    def note_call(self, call: str, answer: Any) -> None:
        """It is given `call`."""
        self.last_call, self.last_answer = call, answer

    @property
    def is_watched(self) -> bool:
        """True if the process's end is seen from here, on this machine; otherwise only Ray reports it."""
        return self._is_here

    def find_end(self) -> ProcessEnd | None:
        """Returns how the process ended by itself; None while it lives, if we ended it, or on another machine."""
        if self.was_ended or not self._is_here:
            return None
        if self._watch is None:
            location = self.find_location()
            if location is None:
                return None
            try:
                self._watch = ProcessWatch(location.pid)
            except ProcessLookupError:
                self.is_gone = True
                return ProcessEnd()
            except OSError:
                self._is_here = False  # Ray alone says how it ended
                return None
        end = self._watch.find_end()
        self.is_gone = self.is_gone or end is not None
        return end

    def is_stopped(self) -> bool:
        """Returns True if a signal such as SIGSTOP holds the process, as far as that can be seen from here."""
        return self._watch is not None and self._watch.is_stopped()

    def end(self) -> None:
        """Kills it."""
        if self.was_ended:
            return
        self.find_end()
        self.was_ended = True
        ray.kill(self.actor)
        if self._watch is not None:
            self._watch.kill()  # Ray asks one that is stopped in vain
            self._watch.close()

    def find_location(self) -> Location | None:
        """Returns the location that the process reported; None if it never did."""
        try:
            location: Location = ray.get(self._location, timeout=0)
        except RayError:
            return None
        return location

    def describe_location(self) -> str:
        """Describes the location that the process reported, if it did."""
        return str(self.find_location() or "a process that never started")


def describe_death(
    process: ActorRef, *, role: str, method: str, rank: int, error: RayError | None, probe: Probe
) -> Failure:
    """Describes the end of a process that ran or was given `role.method`: as the system reports it, else as Ray."""
    end = process.find_end()
    process.is_gone = True
    if not str(end or "") and error is None:  # it ended before it could be watched: Ray knows how, or will soon
        dead = find_dead([process], probe, DEATH_IS_KNOWN_S)
        error = dead and dead[1]
    how = str(end or "") or (in_one_line(error) if error is not None else "it ended")
    where = f"it was given last: {process.last_call}; it was {process.describe_location()}"
    return Failure(
        role=role,
        method=method,
        rank=rank,
        cause_type="",
        message=f"process {process.label} is gone: {how} ({where})",
        remote_traceback="",
        origin=process.origin,
        exit_code=end and end.exit_code,
        signal=end and end.signal,
    )


def find_maker(error: RayError) -> str:
    """The process that made a lost object, as a `Failure`'s origin; empty if Ray does not name it."""
    cause = getattr(error, "cause", error) if isinstance(error, RayTaskError) else error
    actor_id = getattr(cause, "actor_id", None)
    if isinstance(cause, ObjectLostError):
        # An object's id contains that of the actor that made it.
        actor_id = ray.ObjectRef(bytes.fromhex(cause.object_ref_hex)).task_id().actor_id().hex()
    return _origin_of(actor_id) if actor_id else ""


def own_origin() -> str:
    """Returns the controller's name for this process as a `Failure`'s origin."""
    return _origin_of(ray.get_runtime_context().get_actor_id())


def _origin_of(actor_id: str | None) -> str:
    return f"process {actor_id}"


def in_one_line(error: RayError) -> str:
    """Its text, whose lines Ray breaks."""
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def describe_processes(processes: Sequence[ActorRef], probe: Probe, timeout_s: float) -> list[tuple[bool, str]]:
    """Returns for each process True if it responds, and its activity, machine and stack.

    For a process that is gone or does not respond in time: its last call, and the place where its stack can be read.
    """
    answers = probe.ask([process.actor for process in processes], "describe", timeout_s)
    return [
        (not isinstance(answer, RayError), _describe(process, answer))
        for process, answer in zip(processes, answers, strict=True)
    ]


def find_dead(processes: Sequence[ActorRef], probe: Probe, timeout_s: float) -> tuple[ActorRef, RayError] | None:
    """Returns the first process that Ray knows to be dead or cannot reach, and Ray's error.

    A living process answers at once. A process that died a moment ago does not answer until Ray knows of its end. A
    process that never started is not asked.
    """
    asked = [process for process in processes if process.find_location() is not None]
    answers = probe.ask([process.actor for process in asked], "locate", timeout_s) if asked else []
    found = zip(asked, answers, strict=True)
    return next(((process, error) for process, error in found if isinstance(error, _LOST)), None)


def _describe(process: ActorRef, answer: Any) -> str:
    where = process.describe_location()
    if isinstance(answer, RayError):
        if process.find_location() is None:
            where = "it never started: its slot is gone, or Ray cannot start a process there"
        else:
            where = f"for its stack see {where}"
        reason = "it is stopped, as by SIGSTOP" if process.is_stopped() else type(answer).__name__
        return f"no answer ({reason}); given last: {process.last_call}; {where}"
    stage, stack = answer
    if process.last_call != "none" and not stage.startswith(f"{process.last_call}:"):
        why = "waiting for the inputs of" if "idle for" in stage else "has not begun"
        stage = f"{stage}; {why} {process.last_call}"
    if "idle for" in stage:
        stack = ""  # an idle process is in Ray's own loop
    return f"{stage}; {where}\n{stack.rstrip()}".rstrip()
