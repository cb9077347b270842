"""The processes that hold the same roles, one actor per rank of a pool; and all processes on a pool."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from hf_controller.executors.ray.actor import Construction, HostActor, Joining
from hf_controller.executors.ray.host_process import (
    DEATH_IS_KNOWN_S,
    HostProcess,
    describe_death,
    describe_processes,
    find_dead,
)
from hf_controller.executors.ray.placement import PlacedPool
from hf_controller.executors.ray.shipping import PackedRoles, list_import_path
from hf_controller.executors.ray.waiting import Inquirer, Waiter
from hf_controller.failures import Deadline, Failure, diagnosed
from hf_controller.groups.default_group import Rendezvous
from hf_protocols import HybridFlowError, ProtocolError, WorkerTimeoutError
from hf_protocols.validation import show

__all__ = ["HostSet", "OccupiedPool", "Undone", "await_answers", "await_ready"]

_ANSWER_TIMEOUT_S = 5.0
_GAP_S = 5.0
_CLOSE_TIMEOUT_S = 5.0


class HostSet:
    """Starts the processes and the construction of their workers, and does not wait for it.

    Args:
        placed: the pool, with its slots.
        roles: the roles that share these processes.
        cuts_slices: whether other machines may ask for slices of what they return.
        collective_timeout_s: deadline of every collective in their default process group.
        start_timeout_s: deadline of their meeting.
        is_local: whether the processes are all on this machine.

    Attributes:
        name: the roles, such as `"actor+critic"`.
        pool: their pool.
        roles: what the workers are built from, by role.
        actors: the actor of every rank.
        processes: the process of every rank.
        constructing: the process of every rank by the handle of its construction.
        meets_peers: whether they have a process group.
        failure: the first failure of the group, with which it ended.
        was_released: whether it was ended in order.
    """

    def __init__(
        self,
        placed: PlacedPool,
        packed: PackedRoles,
        *,
        cuts_slices: bool,
        collective_timeout_s: float,
        start_timeout_s: float,
        is_local: bool,
    ) -> None:
        pool, roles = placed.pool, packed.roles
        self._connections: dict[tuple[str, str], HostSet] = {}
        self.name = "+".join(roles)
        self.pool = pool
        self.failure: Failure | None = None
        self.was_released = False
        self.roles = dict(roles)
        prefix = f"{self.name}-{uuid.uuid4().hex[:12]}"
        self.actors = [
            _start_host(f"{prefix}-{rank}", self.name, rank, pool.num_slots, cuts_slices, **placed.options(rank))
            for rank in range(pool.num_slots)
        ]
        self.processes = [
            HostProcess(self.name, rank, pool.name, actor, is_here=is_local) for rank, actor in enumerate(self.actors)
        ]
        process_group = any(spec.worker.needs_process_group for spec in roles.values())
        self._has_process_group = process_group
        construction = Construction(
            specs=packed.specs,
            import_path=tuple(list_import_path()),
            pool=pool.name,
            device=pool.device,
            slots=pool.slots,
            environment=packed.environment,
            process_group=process_group,
            on_one_machine=placed.on_one_machine,
            collective_timeout_s=collective_timeout_s,
            start_timeout_s=start_timeout_s,
        )
        rendezvous = None
        if process_group and pool.num_slots > 1:
            rendezvous = self.actors[0].open_rendezvous.remote(uuid.uuid4().hex, placed.on_one_machine)
        self.constructing = {
            process.actor.construct.remote(construction, rendezvous): process for process in self.processes
        }

    def check_connection(self, role: str, name: str) -> None:
        """Refuse a name that the role's connections have, before any rank waits for others.

        Raises:
            ProtocolError: if it is taken.
        """
        if (role, name) in self._connections:
            raise ProtocolError(f"{role} has a connection {show(name)} already: choose another name")

    def connect(self, joining: Joining, rendezvous: Rendezvous) -> dict[Any, HostProcess]:
        """Start joining another group: the process of every rank by the handle of its answer."""
        return {process.actor.connect.remote(joining, rendezvous): process for process in self.processes}

    def keep_connection(self, role: str, name: str, other: HostSet) -> None:
        """Note that every rank has joined those of `other`."""
        self._connections[role, name] = other

    def disconnect(self, role: str, name: str) -> None:
        """Have every rank leave a connection, if it is in it, once its earlier calls are over; the name is free."""
        self._connections.pop((role, name), None)
        for actor in self.actors:
            actor.disconnect.remote(role, name)

    def give_up(self, joining: Joining) -> None:
        """Have every rank stop joining where it still does, and leave the connection if it has joined."""
        for actor in self.actors:
            actor.give_up.remote(joining.name, joining.token)
        self.disconnect(joining.role, joining.name)

    @property
    def meets_peers(self) -> bool:
        """True if a rank may wait for another one."""
        return self._has_process_group or bool(self._connections)

    def list_joined(self) -> list[HostSet]:
        """This set and those that it is connected with, or they are."""
        joined = [self]
        for each in joined:
            joined += [other for other in each._connections.values() if other not in joined]
        return list(dict.fromkeys(joined))

    def is_ready(self) -> bool:
        """Returns True if all workers are constructed."""
        if self.constructing:
            handles = list(self.constructing)
            if ray.wait(handles, num_returns=len(handles), timeout=0)[1]:
                return False
        return True

    def fail(self, failure: Failure) -> None:
        """End the processes at once: the group answers with its first failure from now on."""
        self.failure = failure
        self.kill()

    def release(self) -> None:
        """End the processes because nobody wants the group any more."""
        self.was_released = True
        self.kill()

    def disconnect_all(self, others: Sequence[HostSet]) -> None:
        """Leave the connections with `others`."""
        for (role, name), other in list(self._connections.items()):
            if other in others:
                self.disconnect(role, name)

    def close(self, timeout_s: float) -> None:
        """Ask every worker to close, as far as they answer in time."""
        asked = [actor.close.remote() for actor in self.actors]
        ray.wait(asked, num_returns=len(asked), timeout=timeout_s)

    def kill(self) -> None:
        """End the processes at once."""
        for process in self.processes:
            process.end()


def _start_host(name: str, role: str, rank: int, world_size: int, cuts_slices: bool, **options: Any) -> Any:
    groups = {"service": 4, "slices": 2}
    # Our trace has every call; Ray's own record of each task costs all processes time.
    decorate: Any = ray.remote(  # type: ignore[call-overload]
        max_restarts=0, max_task_retries=0, concurrency_groups=groups, enable_task_events=False
    )
    slicer = name if cuts_slices else None
    return decorate(HostActor).options(name=name, **options).remote(role, rank, world_size, slicer)


class Undone(NamedTuple):
    """Reason for which some processes are not done with a request, and the ones that failed or are late."""

    failure: Failure
    processes: Sequence[HostProcess]

    @property
    def error(self) -> HybridFlowError:
        """The error to raise."""
        return self.failure.to_error()


def await_ready(host_sets: Sequence[HostSet], deadline: Deadline, waiter: Waiter, inquirer: Inquirer) -> Undone | None:
    """Wait until every worker of `host_sets` is constructed. Returns the result of `await_answers`."""
    asked = {handle: process for host_set in host_sets for handle, process in host_set.constructing.items()}
    failed = next((each for each in host_sets if each.constructing and each.failure is not None), None)
    if failed is not None and failed.failure is not None:
        return Undone(failed.failure, failed.processes)
    undone = await_answers(asked, "__init__", deadline, waiter, inquirer)
    for host_set in host_sets:
        if undone is not None and any(process in undone.processes for process in host_set.processes):
            host_set.failure = undone.failure  # of its calls, too
        if undone is None:
            host_set.constructing.clear()
            for process in host_set.processes:
                process.find_end()  # from now on its end is seen
    return undone


def await_answers(
    asked: Mapping[Any, HostProcess],
    method: str,
    deadline: Deadline,
    waiter: Waiter,
    inquirer: Inquirer,
    since_s: float | None = None,
) -> Undone | None:
    """Wait until every rank has answered what it was asked, or one that it failed, or time is up.

    Args:
        asked: the process of every rank by the handle of its answer.
        method: what the ranks do.
        deadline: of all of them.
        waiter: waits.
        inquirer: asks those that are late.
        since_s: when the deadline began, in seconds of `time.monotonic`; None: now.

    Returns:
        None if all is done. Else what went wrong on the first rank that failed; or for those that are not done in time
        a WorkerTimeoutError with what each is at, and its stack.
    """
    ends_s = (time.monotonic() if since_s is None else since_s) + deadline.seconds
    pending = list(asked)
    while pending:
        begun_s = time.monotonic()
        ready = waiter.wait_slice(pending)
        if time.monotonic() - begun_s > _GAP_S:
            ends_s += time.monotonic() - begun_s  # this process stood still
        answers = {asked[handle]: _failure(handle, asked[handle], method, inquirer) for handle in ready}
        failures = {process: failure for process, failure in answers.items() if failure is not None}
        dead = [process for handle in pending if (process := asked[handle]).find_end() is not None]
        if dead or failures:
            # A process that is gone is why others failed.
            left = [process for handle in pending if not (process := asked[handle]).is_watched]
            lost = None if dead or len(asked) == 1 else find_dead(left, inquirer, DEATH_IS_KNOWN_S)
            if lost is not None:
                return Undone(_describe(lost[0], method, lost[1], inquirer), [lost[0], *failures])
            first = _describe(dead[0], method, None, inquirer) if dead else next(iter(failures.values()))
            return Undone(first, [*dead, *failures])
        pending = [handle for handle in pending if handle not in ready]
        if pending and time.monotonic() > ends_s:
            late = [asked[handle] for handle in pending]
            error = _to_timeout(late, method, deadline, inquirer)
            role = late[0].label.rpartition("/")[0]
            failure = Failure.of(error, role=role, method=method, rank=late[0].rank)
            return Undone(replace(failure, remote_traceback=""), late)
    return None


def _to_timeout(
    missing: Sequence[HostProcess], method: str, deadline: Deadline, inquirer: Inquirer
) -> WorkerTimeoutError:
    labels = ", ".join(process.label for process in missing)
    head = f"{labels} not done with {method} within {deadline.seconds:g} s: raise {deadline.key}, or look at the cause:"

    def describe() -> str:
        told = describe_processes(missing, inquirer, _ANSWER_TIMEOUT_S)
        return "\n".join(f"{process.label}: {text}" for process, (_, text) in zip(missing, told, strict=True))

    return WorkerTimeoutError(f"{head}\n{diagnosed(describe)}")


def _failure(handle: Any, process: HostProcess, method: str, inquirer: Inquirer) -> Failure | None:
    try:
        answer = ray.get(handle)
    except RayError as error:
        return _describe(process, method, error, inquirer)
    return answer if isinstance(answer, Failure) else None


def _describe(process: HostProcess, method: str, error: RayError | None, inquirer: Inquirer) -> Failure:
    role = process.label.rpartition("/")[0]
    return describe_death(process, role=role, method=method, rank=process.rank, error=error, inquirer=inquirer)


@dataclass
class OccupiedPool:
    """A pool in use: its slots and its processes."""

    placed: PlacedPool
    host_sets: list[HostSet] = field(default_factory=list)

    def find_unfinished(self, but_for: HostSet | None = None) -> list[Any]:
        """Answers that are there once every call on the pool is over, or every one of other processes."""
        host_sets = [host_set for host_set in self.host_sets if host_set is not but_for]
        last = [process.last_answer for host_set in host_sets for process in host_set.processes]
        answers = [answer for answer in last if answer is not None]
        return ray.wait(answers, num_returns=len(answers), timeout=0, fetch_local=False)[1] if answers else []

    def end(self, host_sets: Sequence[HostSet], *, orderly: bool) -> None:
        """End the processes of some groups; where all calls are over, orderly, their workers close first."""
        # Ranks that are still at a call may never answer.
        if orderly and not self.find_unfinished():
            for host_set in host_sets:
                if host_set.failure is None:
                    host_set.close(_CLOSE_TIMEOUT_S)
        for host_set in host_sets:
            host_set.release()
