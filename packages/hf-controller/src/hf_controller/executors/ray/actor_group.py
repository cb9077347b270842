"""The processes that hold the same roles, one actor per rank of a pool; all of a pool; connections of two groups."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from hf_controller.executors.ray.actor import Construction, Joining, RankActor
from hf_controller.executors.ray.actor_ref import (
    DEATH_IS_KNOWN_S,
    ActorRef,
    describe_death,
    describe_processes,
    find_dead,
)
from hf_controller.executors.ray.placement import PlacedPool
from hf_controller.executors.ray.shipping import PackedRoles, list_import_path
from hf_controller.executors.ray.waiting import Probe, Waiter
from hf_controller.failures import Deadline, Failure, diagnosed
from hf_controller.groups.default_group import Rendezvous
from hf_controller.groups.worker_group import WorkerGroup
from hf_protocols import HybridFlowError, ProtocolError, WorkerTimeoutError
from hf_protocols.validation import show

__all__ = [
    "ActorGroup",
    "OccupiedPool",
    "Undone",
    "await_answers",
    "await_ready",
    "check_connection",
    "plan_joinings",
]

_ANSWER_TIMEOUT_S = 5.0
_GAP_S = 5.0
_CLOSE_TIMEOUT_S = 5.0


class ActorGroup:
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
        self._connections: dict[tuple[str, str], ActorGroup] = {}
        self.name = "+".join(roles)
        self.pool = pool
        self.failure: Failure | None = None
        self.was_released = False
        self.roles = dict(roles)
        prefix = f"{self.name}-{uuid.uuid4().hex[:12]}"
        self.actors = [
            _start_actor(f"{prefix}-{rank}", self.name, rank, pool.num_slots, cuts_slices, **placed.options(rank))
            for rank in range(pool.num_slots)
        ]
        self.processes = [
            ActorRef(self.name, rank, pool.name, actor, is_here=is_local) for rank, actor in enumerate(self.actors)
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
            threads=os.environ.get("OMP_NUM_THREADS"),
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
        """Refuses a name that the role's connections have, before any rank waits for others.

        Raises:
            ProtocolError: if it is taken.
        """
        if (role, name) in self._connections:
            raise ProtocolError(f"{role} has a connection {show(name)} already. Choose another name")

    def connect(self, joining: Joining, rendezvous: Rendezvous) -> dict[Any, ActorRef]:
        """Starts joining another group; returns the process of every rank by the handle of its answer."""
        return {process.actor.connect.remote(joining, rendezvous): process for process in self.processes}

    def keep_connection(self, role: str, name: str, other: ActorGroup) -> None:
        """Notes that every rank has joined those of `other`."""
        self._connections[role, name] = other

    def disconnect(self, role: str, name: str) -> None:
        """Has every rank that is in a connection leave it once its earlier calls are over; frees the name."""
        self._connections.pop((role, name), None)
        for actor in self.actors:
            actor.disconnect.remote(role, name)

    def give_up(self, joining: Joining) -> None:
        """Has every rank stop joining if it still does so, and leave the connection if it has joined."""
        for actor in self.actors:
            actor.give_up.remote(joining.name, joining.token)
        self.disconnect(joining.role, joining.name)

    @property
    def meets_peers(self) -> bool:
        """True if a rank may wait for another one."""
        return self._has_process_group or bool(self._connections)

    def list_joined(self) -> list[ActorGroup]:
        """This group and all groups that are connected with it, directly or through other groups."""
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
        """Ends the processes at once; from now on the group reports its first failure."""
        self.failure = failure
        self.kill()

    def release(self) -> None:
        """Ends the processes of a group that its owner has given up."""
        self.was_released = True
        self.kill()

    def disconnect_all(self, others: Sequence[ActorGroup]) -> None:
        """Leaves the connections with `others`."""
        for (role, name), other in list(self._connections.items()):
            if other in others:
                self.disconnect(role, name)

    def close(self, timeout_s: float) -> None:
        """Asks every worker to close, and waits for the answers until the timeout."""
        asked = [actor.close.remote() for actor in self.actors]
        ray.wait(asked, num_returns=len(asked), timeout=timeout_s)

    def kill(self) -> None:
        """Ends the processes at once."""
        for process in self.processes:
            process.end()


def _start_actor(name: str, role: str, rank: int, world_size: int, cuts_slices: bool, **options: Any) -> Any:
    groups = {"service": 4, "slices": 2}
    # Our trace has every call; Ray's own record of each task costs all processes time.
    decorate: Any = ray.remote(  # type: ignore[call-overload]
        max_restarts=0, max_task_retries=0, concurrency_groups=groups, enable_task_events=False
    )
    slicer = name if cuts_slices else None
    return decorate(RankActor).options(name=name, **options).remote(role, rank, world_size, slicer)


class Undone(NamedTuple):
    """The reason why a request is not done, and the processes that failed or are late."""

    failure: Failure
    processes: Sequence[ActorRef]

    @property
    def error(self) -> HybridFlowError:
        """The error to raise."""
        return self.failure.to_error()


def await_ready(actor_groups: Sequence[ActorGroup], deadline: Deadline, waiter: Waiter, probe: Probe) -> Undone | None:
    """Waits until every worker of `actor_groups` is constructed. Returns the result of `await_answers`."""
    asked = {handle: process for actor_group in actor_groups for handle, process in actor_group.constructing.items()}
    failed = next((each for each in actor_groups if each.constructing and each.failure is not None), None)
    if failed is not None and failed.failure is not None:
        return Undone(failed.failure, failed.processes)
    undone = await_answers(asked, "__init__", deadline, waiter, probe)
    for actor_group in actor_groups:
        if undone is not None and any(process in undone.processes for process in actor_group.processes):
            actor_group.failure = undone.failure  # of its calls, too
        if undone is None:
            actor_group.constructing.clear()
            for process in actor_group.processes:
                process.find_end()  # from now on its end is seen
    return undone


def await_answers(
    asked: Mapping[Any, ActorRef],
    method: str,
    deadline: Deadline,
    waiter: Waiter,
    probe: Probe,
    since_s: float | None = None,
) -> Undone | None:
    """Waits until every rank has answered a request, one rank has failed, or time is up.

    Args:
        asked: the process of every rank by the handle of its answer.
        method: what the ranks do.
        deadline: of all of them.
        waiter: waits.
        probe: asks those that are late.
        since_s: when the deadline began, in seconds of `time.monotonic`; None: now.

    Returns:
        None if all is done. Otherwise the failure of the first rank that failed; or, for ranks that are not done in
        time, a WorkerTimeoutError with the activity and the stack of each.
    """
    ends_s = (time.monotonic() if since_s is None else since_s) + deadline.seconds
    pending = list(asked)
    while pending:
        begun_s = time.monotonic()
        ready = waiter.wait_slice(pending)
        if time.monotonic() - begun_s > _GAP_S:
            ends_s += time.monotonic() - begun_s  # this process stood still
        answers = {asked[handle]: _failure(handle, asked[handle], method, probe) for handle in ready}
        failures = {process: failure for process, failure in answers.items() if failure is not None}
        dead = [process for handle in pending if (process := asked[handle]).find_end() is not None]
        if dead or failures:
            # A process that is gone is why others failed.
            left = [process for handle in pending if not (process := asked[handle]).is_watched]
            lost = None if dead or len(asked) == 1 else find_dead(left, probe, DEATH_IS_KNOWN_S)
            if lost is not None:
                return Undone(_describe(lost[0], method, lost[1], probe), [lost[0], *failures])
            first = _describe(dead[0], method, None, probe) if dead else next(iter(failures.values()))
            return Undone(first, [*dead, *failures])
        pending = [handle for handle in pending if handle not in ready]
        if pending and time.monotonic() > ends_s:
            late = [asked[handle] for handle in pending]
            error = _to_timeout(late, method, deadline, probe)
            role = late[0].label.rpartition("/")[0]
            failure = Failure.of(error, role=role, method=method, rank=late[0].rank)
            return Undone(replace(failure, remote_traceback=""), late)
    return None


def _to_timeout(missing: Sequence[ActorRef], method: str, deadline: Deadline, probe: Probe) -> WorkerTimeoutError:
    labels = ", ".join(process.label for process in missing)
    head = f"{labels} not done with {method} within {deadline.seconds:g} s. Raise {deadline.key}, or look at the cause:"

    def describe() -> str:
        described = describe_processes(missing, probe, _ANSWER_TIMEOUT_S)
        return "\n".join(f"{process.label}: {text}" for process, (_, text) in zip(missing, described, strict=True))

    return WorkerTimeoutError(f"{head}\n{diagnosed(describe)}")


def _failure(handle: Any, process: ActorRef, method: str, probe: Probe) -> Failure | None:
    try:
        answer = ray.get(handle)
    except RayError as error:
        return _describe(process, method, error, probe)
    return answer if isinstance(answer, Failure) else None


def _describe(process: ActorRef, method: str, error: RayError | None, probe: Probe) -> Failure:
    role = process.label.rpartition("/")[0]
    return describe_death(process, role=role, method=method, rank=process.rank, error=error, probe=probe)


@dataclass
class OccupiedPool:
    """A pool in use: its slots and its processes."""

    placed: PlacedPool
    actor_groups: list[ActorGroup] = field(default_factory=list)

    def find_unfinished(self, but_for: ActorGroup | None = None) -> list[Any]:
        """Returns the last answers that are pending: of all processes of the pool, or of all but those of `but_for`."""
        actor_groups = [actor_group for actor_group in self.actor_groups if actor_group is not but_for]
        last = [process.last_answer for actor_group in actor_groups for process in actor_group.processes]
        answers = [answer for answer in last if answer is not None]
        return ray.wait(answers, num_returns=len(answers), timeout=0, fetch_local=False)[1] if answers else []

    def end(self, actor_groups: Sequence[ActorGroup], *, orderly: bool) -> None:
        """Ends the processes of some groups. With `orderly`, and if all calls are over, their workers close first."""
        # Ranks that are still at a call may never answer.
        if orderly and not self.find_unfinished():
            for actor_group in actor_groups:
                if actor_group.failure is None:
                    actor_group.close(_CLOSE_TIMEOUT_S)
        for actor_group in actor_groups:
            actor_group.release()


def check_connection(first: WorkerGroup, second: WorkerGroup, actor_groups: Sequence[ActorGroup], name: str) -> None:
    """Refuses groups that cannot meet in a collective, before any rank waits for others.

    Raises:
        ProtocolError: naming the groups.
        HybridFlowError: the first failure of a group that ended.
    """
    for actor_group in actor_groups:
        if actor_group.failure is not None:
            raise actor_group.failure.to_error()
    if actor_groups[0] is actor_groups[1]:
        raise ProtocolError(f"{first.role} and {second.role} share their processes: they have one group already")
    if first.pool is second.pool:
        raise ProtocolError(
            f"{first.role} and {second.role} stand on one pool ({show(first.pool.name)}) and take turns, so they never "
            "meet in a collective. Give each a pool of its own, or fuse them (fused=True)"
        )
    if first.role == second.role:
        raise ProtocolError(f"both groups have the role {show(first.role)}, which distinguishes a connection's sides")
    for group, actor_group in zip((first, second), actor_groups, strict=True):
        actor_group.check_connection(group.role, name)


def plan_joinings(
    first: WorkerGroup, second: WorkerGroup, name: str, *, on_one_machine: bool, timeout_s: float
) -> list[Joining]:
    """Plans a connection, for the ranks of each group."""
    border, end = first.world_size, first.world_size + second.world_size
    joining = Joining(
        name=name,
        token=uuid.uuid4().hex,
        role=first.role,
        ranks={first.role: tuple(range(border)), second.role: tuple(range(border, end))},
        device="cpu" if "cpu" in (first.pool.device, second.pool.device) else "cuda:0",
        on_one_machine=on_one_machine,
        timeout_s=timeout_s,
    )
    return [replace(joining, role=group.role) for group in (first, second)]
