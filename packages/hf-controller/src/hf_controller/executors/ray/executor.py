"""The distributed executor: one Ray actor per rank, direct data flow between them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError

from hf_controller.dispatch import Call
from hf_controller.executors.base import Executor, check_specs
from hf_controller.executors.ray.actor import Construction, HostActor
from hf_controller.executors.ray.cluster import start_cluster, stop_cluster
from hf_controller.executors.ray.pending import RayCall, take_ready
from hf_controller.executors.ray.placement import PlacedPool, place
from hf_controller.executors.ray.store import RayStore
from hf_controller.failures import Failure
from hf_controller.resource_pool import ResourcePool
from hf_controller.signals import TerminationGuard, shielded
from hf_controller.trace import Trace
from hf_controller.worker import WorkerSpec
from hf_controller.worker_group import WorkerGroup
from hf_protocols import MethodSpec, PoolError, WorkerTimeoutError

__all__ = ["RayExecutor"]

_CLOSE_TIMEOUT_S = 5.0


@dataclasses.dataclass
class _HostSet:
    """The processes that hold the same roles, one per rank."""

    name: str
    roles: tuple[str, ...]
    actors: list[Any]


@dataclasses.dataclass
class _Occupied:
    """A pool in use: its slots, its processes, and the call that was made last on it."""

    placed: PlacedPool
    host_sets: list[_HostSet]
    last_host_set: _HostSet | None = None
    last_reports: Sequence[Any] = ()


class RayExecutor(Executor):
    """Runs groups on Ray: by default on a cluster of its own on this machine, never on a foreign one by accident.

    Args:
        address: ``"local"`` starts a cluster and ignores ``RAY_ADDRESS``; anything else joins that cluster.
        num_cpus: slots of CPU pools that the local cluster offers, however many cores there are; None: one per core.
        object_store_bytes: shared memory of the local cluster, reserved as it is used.
        start_timeout_s: deadline of placing a pool and constructing its workers.
        call_timeout_s: how long a result, or a rank that waits for inputs, waits by default.
        collective_timeout_s: deadline of a collective in the default process groups.
        log_to_driver: show what workers print, with role and rank, on standard error.
    """

    def __init__(
        self,
        *,
        address: str = "local",
        num_cpus: int | None = None,
        object_store_bytes: int = 512 * 2**20,
        start_timeout_s: float = 120.0,
        call_timeout_s: float = 600.0,
        collective_timeout_s: float = 300.0,
        log_to_driver: bool = True,
    ) -> None:
        super().__init__()
        self.call_timeout_s = call_timeout_s
        self.trace = Trace(take_ready)
        self._store = RayStore()
        self._start_timeout_s = start_timeout_s
        self._collective_timeout_s = collective_timeout_s
        self._occupied: dict[ResourcePool, _Occupied] = {}
        self._host_sets: dict[WorkerGroup, _HostSet] = {}
        self._closed = False
        self._guard = TerminationGuard()
        start_cluster(
            address=address, num_cpus=num_cpus, object_store_bytes=object_store_bytes, log_to_driver=log_to_driver
        )
        self._guard.install()

    def build_groups(
        self, pool: ResourcePool, specs: Mapping[str, WorkerSpec], *, fused: bool = False
    ) -> dict[str, WorkerGroup]:
        """Build one group per role; see :meth:`Executor.build_groups`."""
        if self._closed:
            raise PoolError("this executor is closed: make another")
        check_specs(pool, specs)
        deadline_s = time.monotonic() + self._start_timeout_s
        if pool not in self._occupied:
            self._occupied[pool] = _Occupied(place(pool, self._start_timeout_s), [])
        occupied = self._occupied[pool]
        role_sets = [dict(specs)] if fused else [{role: spec} for role, spec in specs.items()]
        built = [self._create(occupied, roles) for roles in role_sets]
        constructing = {}
        for host_set, roles in zip(built, role_sets, strict=True):
            constructing.update(self._construct(occupied, host_set, roles, deadline_s))
        self._await_construction(constructing, deadline_s)
        groups = {}
        for host_set, roles in zip(built, role_sets, strict=True):
            for role, spec in roles.items():
                groups[role] = WorkerGroup(role, spec, pool, self._submit)
                self._host_sets[groups[role]] = host_set
        return groups

    def release(self, pool: ResourcePool) -> None:
        """Close every group on ``pool`` and give its slots back. Processes that do not answer in time are killed."""
        self._release(pool, orderly=True)

    def close(self) -> None:
        """End every worker, give all slots back and stop the cluster if it is our own, in a few seconds."""
        self._close(orderly=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception ranks may hang in a collective, so nobody is asked to finish.
        self._close(orderly=kind is None)

    def _release(self, pool: ResourcePool, *, orderly: bool) -> None:
        occupied = self._occupied.pop(pool, None)
        if occupied is None:
            return
        actors = [actor for host_set in occupied.host_sets for actor in host_set.actors]
        if orderly:
            ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=_CLOSE_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)
        occupied.placed.remove()
        self._host_sets = {group: hosts for group, hosts in self._host_sets.items() if group.pool is not pool}

    def _close(self, *, orderly: bool) -> None:
        if self._closed:
            return
        self._closed = True
        with shielded():
            try:
                self.trace.drain()
                for pool in list(self._occupied):
                    self._release(pool, orderly=orderly)
            finally:
                stop_cluster()
                self._guard.restore()

    def _create(self, occupied: _Occupied, roles: Mapping[str, WorkerSpec]) -> _HostSet:
        """Start the processes of a host set."""
        pool = occupied.placed.pool
        name = "+".join(roles)
        decorate: Any = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"service": 4})  # type: ignore[call-overload]
        remote = decorate(HostActor)
        actors = [
            remote.options(**occupied.placed.options(rank)).remote(name, rank, pool.num_slots)
            for rank in range(pool.num_slots)
        ]
        host_set = _HostSet(name, tuple(roles), actors)
        occupied.host_sets.append(host_set)
        return host_set

    def _construct(
        self, occupied: _Occupied, host_set: _HostSet, roles: Mapping[str, WorkerSpec], deadline_s: float
    ) -> dict[Any, str]:
        """Start constructing the workers; the answer names the rank behind each handle."""
        pool, actors = occupied.placed.pool, host_set.actors
        process_group = any(spec.worker.needs_process_group for spec in roles.values())
        addresses = self._ask([actor.locate.remote() for actor in actors], deadline_s, host_set.name)
        on_one_machine = len(set(addresses)) == 1
        rendezvous = None
        if process_group and len(actors) > 1:
            address = "127.0.0.1" if on_one_machine else addresses[0]
            (rendezvous,) = self._ask([actors[0].open_rendezvous.remote(address)], deadline_s, host_set.name)
        construction = Construction(
            specs=_pickle_specs(roles),
            pool=pool.name,
            device=pool.device,
            rendezvous=rendezvous,
            process_group=process_group,
            on_one_machine=on_one_machine,
            collective_timeout_s=self._collective_timeout_s,
        )
        return {actor.construct.remote(construction): f"{host_set.name}/{rank}" for rank, actor in enumerate(actors)}

    def _ask(self, handles: list[Any], deadline_s: float, name: str) -> list[Any]:
        try:
            return list(ray.get(handles, timeout=max(0.1, deadline_s - time.monotonic())))
        except GetTimeoutError as error:
            raise WorkerTimeoutError(
                f"the processes of {name} did not start within {self._start_timeout_s:g} s: raise start_timeout_s"
            ) from error

    def _await_construction(self, handles: Mapping[Any, str], deadline_s: float) -> None:
        pending = list(handles)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                missing = ", ".join(handles[handle] for handle in pending)
                raise WorkerTimeoutError(
                    f"{missing} did not finish construction within {self._start_timeout_s:g} s: raise start_timeout_s"
                )
            try:
                failure = ray.get(ready[0])
            except RayError as error:
                role, _, rank = handles[ready[0]].rpartition("/")
                failure = Failure.of(error, role=role, method="__init__", rank=int(rank))
            if failure is not None:
                raise failure.to_error()

    def _launch(self, group: WorkerGroup, spec: MethodSpec, calls: Mapping[int, Call]) -> RayCall:
        if group not in self._host_sets:
            raise PoolError(f"group {group.role!r} is closed: its pool {group.pool.name!r} was released")
        host_set, occupied = self._host_sets[group], self._occupied[group.pool]
        after = self._earlier(occupied, host_set)
        outcomes, reports = {}, {}
        for rank, call in calls.items():
            told = dataclasses.replace(call, after=after) if after else call
            outcomes[rank], reports[rank] = host_set.actors[rank].run.remote(told)
        occupied.last_host_set, occupied.last_reports = host_set, list(reports.values())
        self.trace.watch(reports.values())
        return RayCall(
            role=group.role,
            method=calls[next(iter(calls))].method,
            actors={rank: host_set.actors[rank] for rank in calls},
            outcomes=outcomes,
            reports=reports,
            collected=spec.protocol.collect(group.topology).ranks,
            timeout_s=self.call_timeout_s,
        )

    def _earlier(self, occupied: _Occupied, host_set: _HostSet) -> list[Any]:
        """What a call waits for: the pool's last call, unless the same processes run it, one call after another."""
        if len(occupied.host_sets) == 1:
            return []
        return list(occupied.last_reports)


def _pickle_specs(roles: Mapping[str, WorkerSpec]) -> bytes:
    """Roles and classes as bytes; classes of modules that other processes cannot import travel by value."""
    return bytes(cloudpickle.dumps(dict(roles)))  # type: ignore[no-untyped-call]
