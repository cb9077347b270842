"""The distributed executor: one Ray actor per rank, direct data flow between them."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hf_controller.executors.base import (
    Executor,
    check_constructors,
    check_deadline,
    check_pool,
    check_specs,
    close_after,
)
from hf_controller.executors.ray.actor import Joining, Slicer
from hf_controller.executors.ray.actor_group import (
    ActorGroup,
    OccupiedPool,
    Undone,
    await_answers,
    await_ready,
    check_connection,
    plan_joinings,
)
from hf_controller.executors.ray.actor_ref import describe_processes
from hf_controller.executors.ray.call import RayCall, take_ready
from hf_controller.executors.ray.call_state import CallState
from hf_controller.executors.ray.cluster import Cluster
from hf_controller.executors.ray.handles import LocalBatchHandle, SplitBatchHandle, ValueHandle
from hf_controller.executors.ray.placement import place
from hf_controller.executors.ray.shipping import PackedRoles, pack_roles
from hf_controller.executors.ray.store import RayStore
from hf_controller.executors.ray.supervisor import Supervisor
from hf_controller.executors.ray.waiting import Probe, Waiter
from hf_controller.executors.ray.wire import pack_once
from hf_controller.failure_log import FailureLog
from hf_controller.failures import Deadline
from hf_controller.groups.call import Call
from hf_controller.groups.resource_pool import ResourcePool
from hf_controller.groups.worker import WorkerSpec
from hf_controller.groups.worker_group import WorkerGroup
from hf_controller.local_start import choose_store_bytes
from hf_controller.signals import SignalGuard, shielded
from hf_controller.trace import Trace
from hf_protocols import ConfigError, MethodSpec, PoolError
from hf_protocols.foreign_code import Caught
from hf_protocols.validation import Checks, show

__all__ = ["RayExecutor"]

_check_config = Checks(ConfigError)
_check_pool = Checks(PoolError)

_PATIENCE_S = 1e7
"""Time that a rank waits for its inputs; the controller has the deadline, and may be stopped for a while."""


class RayExecutor(Executor):
    """Runs groups on Ray: by default on a cluster of its own on this machine, never on a foreign one by accident.

    Args:
        address: `"local"` starts a cluster and ignores `RAY_ADDRESS`; anything else joins that cluster.
        num_cpus: slots of CPU pools that the local cluster offers, however many cores there are; None: one per
            core that this process may use.
        object_store_bytes: shared memory of the local cluster, taken as it is used; None: 30 % of the memory that
            this process may use, see `hf_controller.choose_store_bytes`.
        start_timeout_s: deadline of placing a pool and constructing its workers.
        call_timeout_s: deadline of a call, counted from the end of everything that it waits for. A call that misses it
            ends its group. Finding the ranks that do not move takes up to 25 s more.
        deadlines: other deadlines, by the name of a method, the kind it is registered with, or the `phase` of its
            worker, looked up in this order; `"__init__"` is the start of workers, `"*"` any other call.
        collective_timeout_s: deadline of a collective in the process groups; None: twice the longest deadline of a
            call, which comes first.
        log_to_driver: show what workers print, with role and rank, on standard error. Lines of several
            ranks that differ in numbers only are collected by Ray for some seconds and may be shown as one with a
            count; `RAY_DEDUP_LOGS=0` in the environment shows each at once.
    """

    def __init__(
        self,
        *,
        address: str = "local",
        num_cpus: int | None = None,
        object_store_bytes: int | None = None,
        start_timeout_s: float = 120.0,
        call_timeout_s: float = 600.0,
        deadlines: Mapping[str, Deadline] | None = None,
        collective_timeout_s: float | None = None,
        log_to_driver: bool = True,
    ) -> None:
        super().__init__()
        given = {"start": start_timeout_s, "call": call_timeout_s}
        given |= {} if collective_timeout_s is None else {"collective": collective_timeout_s}
        for name, timeout_s in given.items():
            _check_config.seconds(f"{name}_timeout_s", timeout_s)
        _check_config.kind("deadlines", deadlines, Mapping | None, "a mapping of names to Deadlines")
        self._deadlines = dict(deadlines or {})
        for name, deadline in self._deadlines.items():
            check_deadline(f"deadlines[{show(name)}]", deadline)
        _check_config.kind("address", address, str, '"local", "auto" or the address of a cluster')
        if num_cpus is not None:
            _check_config.count("num_cpus", num_cpus)
        if address == "local":
            object_store_bytes = choose_store_bytes(object_store_bytes)
        elif object_store_bytes is not None:
            raise ConfigError(
                f"object_store_bytes={show(object_store_bytes)}: address={show(address)} is a cluster with its own. "
                "Leave it out, or set it with `ray start --object-store-memory`"
            )
        self.call_timeout_s = call_timeout_s
        # Ray would wait for a cluster that is lost.
        self.failure_log = FailureLog(lambda handles: {} if self._cluster.is_lost else take_ready(handles))
        self.trace = Trace(self.failure_log.take_spans)
        self._start_timeout_s = start_timeout_s
        longest_s = max(call_timeout_s, *(each.seconds for each in self._deadlines.values()), 0.0)
        self._collective_timeout_s = collective_timeout_s or 2 * longest_s
        self._occupied: dict[ResourcePool, OccupiedPool] = {}
        self._actor_groups: dict[WorkerGroup, ActorGroup] = {}
        self._guard = SignalGuard()
        self._waiter = Waiter(self._guard)
        self._probe = Probe()
        self._cluster = Cluster(
            address=address, num_cpus=num_cpus, object_store_bytes=object_store_bytes, log_to_driver=log_to_driver
        )
        self._supervisor = Supervisor(
            waiter=self._waiter,
            probe=self._probe,
            list_actor_groups=self._list_actor_groups,
            cluster=self._cluster,
        )
        self._joined = address != "local"
        # Joined clusters have other machines, whose ranks ask for slices of what the controller puts.
        self._slicer: Any
        self._slicer, slicer_name = _start_slicer() if self._joined else (None, None)
        self._store = self._ray_store = RayStore(slicer_name, announce=self._cluster.announce)
        self._guard.install()

    def build_groups(
        self, pool: ResourcePool, specs: Mapping[str, WorkerSpec], *, fused: bool = False, wait: bool = True
    ) -> dict[str, WorkerGroup]:
        """Builds one group per role; see `Executor.build_groups`."""
        self._check_open()
        check_specs(pool, specs, fused=fused)
        check_constructors(specs)
        self._check_new(pool, specs)
        groups = {role: WorkerGroup(role, spec, pool, self) for role, spec in specs.items()}
        packed = [pack_roles(roles) for roles in ([specs] if fused else [{role: specs[role]} for role in specs])]
        built: list[ActorGroup] = []

        def undo(_kind: object, error: BaseException | None, _trace: object) -> None:
            if error is not None and pool in self._occupied:
                error.add_note(self._end(pool, built, orderly=False))

        with ExitStack() as stack:
            stack.push(undo)
            stack.enter_context(self._cluster.starting(", ".join(specs), self._start_deadline()))
            if pool not in self._occupied:
                placed = place(pool, self._start_timeout_s, own=list(self._occupied), on_distinct_machines=self._joined)
                self._occupied[pool] = OccupiedPool(placed)
            for each in packed:
                built.append(self._start(pool, each))
                self._actor_groups |= {groups[role]: built[-1] for role in each.roles}
            undone = self._await_ready(built) if wait else None
            if undone is not None:
                raise undone.error
        return groups

    def wait_until_ready(self) -> None:
        """Waits until every worker is constructed; see `Executor.wait_until_ready`."""
        undone = self._await_ready(self._list_actor_groups())
        if undone is None:
            return
        error = undone.error
        for pool, occupied in list(self._occupied.items()):
            if failed := [each for each in occupied.actor_groups if each.failure is undone.failure]:
                error.add_note(self._end(pool, failed, orderly=False))
        raise error

    def connect(self, first: WorkerGroup, second: WorkerGroup, name: str) -> None:
        """Joins two groups in one process group; see `hf_controller.connect`.

        `start_timeout_s` bounds what is left of their construction, and then the joining.
        """
        self._check_open()
        self._supervisor.look()
        actor_groups = [self._actor_group_of(group) for group in (first, second)]
        check_connection(first, second, actor_groups, name)
        nodes = self._occupied[first.pool].placed.nodes | self._occupied[second.pool].placed.nodes
        joinings = plan_joinings(
            first, second, name, on_one_machine=len(nodes) == 1, timeout_s=self._collective_timeout_s
        )
        # A rank that waits for its partners has a deadline, which their construction does not count towards.
        undone = self._await_ready(actor_groups)
        if undone is not None:
            raise undone.error
        with ExitStack() as undo:
            for each, actor_group in zip(joinings, actor_groups, strict=True):
                undo.callback(actor_group.give_up, each)
            self._join(joinings, actor_groups)
            undo.pop_all()
        for each, actor_group, other in zip(joinings, actor_groups, reversed(actor_groups), strict=True):
            actor_group.keep_connection(each.role, name, other)

    def _join(self, joinings: Sequence[Joining], actor_groups: Sequence[ActorGroup]) -> None:
        """Has the ranks of two actor groups meet, within one deadline."""
        await_all = functools.partial(
            await_answers,
            method="connect",
            deadline=self._start_deadline(),
            waiter=self._waiter,
            probe=self._probe,
            since_s=time.monotonic(),
        )
        # The controller waits for this: in the ranks' queues, the wait would hold up their later calls.
        opener = actor_groups[0].processes[0]
        joining = joinings[0]
        opened = opener.actor.open_rendezvous.remote(joining.token, joining.on_one_machine)
        undone = await_all({opened: opener})
        if undone is None:
            asked = [
                each.connect(joining, ray.get(opened)) for each, joining in zip(actor_groups, joinings, strict=True)
            ]
            undone = await_all({handle: process for answers in asked for handle, process in answers.items()})
        if undone is not None:
            raise undone.error

    def describe(self, group: WorkerGroup, timeout_s: float = 5.0) -> dict[int, str]:
        """Returns the activity of each rank; see `Executor.describe`."""
        _check_pool.kind("group", group, WorkerGroup, "a group of this executor")
        processes = self._actor_group_of(group).processes
        described = describe_processes(processes, self._probe, timeout_s)
        return {process.rank: text for process, (_, text) in zip(processes, described, strict=True)}

    def built_on(self, pool: ResourcePool) -> list[dict[str, WorkerSpec]]:
        """Returns the roles on `pool`; see `Executor.built_on`."""
        return (
            [dict(actor_group.roles) for actor_group in self._occupied[pool].actor_groups]
            if pool in self._occupied
            else []
        )

    def failed_with(self, pool: ResourcePool) -> list[ResourcePool]:
        """Returns the pools whose groups failed together with one of `pool`; see `Executor.failed_with`."""
        self._check_open()
        self._supervisor.look_for_deaths(self._actor_groups_on(pool))
        here = {id(each.failure) for each in self._actor_groups_on(pool) if each.failure is not None}
        together = [
            other
            for other in self._occupied
            if other is not pool and any(id(each.failure) in here for each in self._actor_groups_on(other))
        ]
        return [pool, *together]

    def _actor_groups_on(self, pool: ResourcePool) -> list[ActorGroup]:
        return self._occupied[pool].actor_groups if pool in self._occupied else []

    def release(self, pool: ResourcePool) -> None:
        """Closes every group on `pool` and gives its slots back. Processes that do not answer in time are killed."""
        check_pool(pool)
        if pool in self._occupied:
            try:
                for call in self.failure_log.find_failed():
                    call.finish()  # while processes live that were not at fault
            finally:
                self._end(pool, self._occupied[pool].actor_groups, orderly=True)

    def close(self) -> None:
        """Ends every worker, gives all slots back and stops the cluster if it is our own, in a few seconds.

        The folder with the cluster's logs goes with it, unless a rank's process was lost or an error is raised.
        """
        self._close(orderly=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception ranks may hang in a collective, so nobody is asked to finish.
        orderly, keeps_logs = False, kind is None or issubclass(kind, Exception)
        failure = error
        try:
            if kind is None and not self._closed:
                with Caught() as caught:
                    self._end_calls()
                    orderly, keeps_logs = True, False
                failure = caught.error
        finally:
            close_after(failure, functools.partial(self._close, orderly=orderly, keeps_logs=keeps_logs))
        if failure is not None and failure is not error:
            raise failure

    def _finish_calls(self) -> None:
        late: set[ResourcePool] = set()
        for call in self.failure_log.find_unsettled():
            # Where one is late, those behind it wait for it.
            if call.pool not in late and not call.finish():
                late.add(call.pool)

    def _start(self, pool: ResourcePool, packed: PackedRoles) -> ActorGroup:
        actor_group = ActorGroup(
            self._occupied[pool].placed,
            packed,
            cuts_slices=self._joined,
            collective_timeout_s=self._collective_timeout_s,
            start_timeout_s=self._start_timeout_s,
            is_local=not self._joined,
        )
        self._occupied[pool].actor_groups.append(actor_group)
        return actor_group

    def _await_ready(self, actor_groups: Sequence[ActorGroup]) -> Undone | None:
        return await_ready(actor_groups, self._start_deadline(), self._waiter, self._probe)

    def _start_deadline(self) -> Deadline:
        return self._deadlines.get("__init__", Deadline(self._start_timeout_s, "start_timeout_s"))

    def _deadline_of(self, group: WorkerGroup, method: str) -> Deadline:
        """The deadline of a call that is made now."""
        if self._phase_deadline is not None:
            return self._phase_deadline
        names = (method, group.methods[method].kind, getattr(group.spec.worker, "phase", None), "*")
        known = (self._deadlines.get(str(name)) for name in names)
        return next(filter(None, known), Deadline(self.call_timeout_s, "call_timeout_s"))

    def _end(self, pool: ResourcePool, actor_groups: Sequence[ActorGroup], *, orderly: bool) -> str:
        """Ends some of a pool's groups, and gives its slots back with the last one; says which ended and remain."""
        occupied = self._occupied[pool]
        left = [actor_group for actor_group in occupied.actor_groups if actor_group not in actor_groups]
        occupied.end(actor_groups, orderly=orderly)
        for actor_group in self._list_actor_groups():
            if actor_group not in actor_groups:
                actor_group.disconnect_all(actor_groups)
        self._actor_groups = {group: each for group, each in self._actor_groups.items() if each not in actor_groups}
        occupied.actor_groups = left
        if not left:
            occupied.placed.remove()
            del self._occupied[pool]
        ended = ", ".join(role for actor_group in actor_groups for role in actor_group.roles) or "no group"
        stand = ", ".join(role for actor_group in left for role in actor_group.roles)
        others = f"its other groups stand: {stand}" if stand else "it has no other group and gave its slots back"
        return f"on pool {show(pool.name)} was ended: {ended}; {others}. build_groups(...) builds on it again"

    def _close(self, *, orderly: bool, keeps_logs: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        # Errors name the logs of processes that are gone.
        keeps_logs = keeps_logs or any(
            each.is_gone for actor_group in self._list_actor_groups() for each in actor_group.processes
        )
        try:
            with shielded():
                try:
                    self.trace.drain()
                    for occupied in self._occupied.values() if not self._cluster.is_lost else ():
                        occupied.end(occupied.actor_groups, orderly=orderly)
                        if self._joined:  # our own cluster ends with us
                            occupied.placed.remove()
                finally:
                    self._occupied.clear()
                    self._actor_groups.clear()
                    self._ray_store.close()
                    self._waiter.close()
                    self._cluster.stop(keeps_logs=keeps_logs)
        finally:  # after the block, which puts back the handlers that it found
            self._guard.restore()

    def _launch(self, group: WorkerGroup, spec: MethodSpec, calls: Mapping[int, Call]) -> RayCall:
        actor_group, occupied = self._actor_group_of(group), self._occupied[group.pool]
        if actor_group.failure is not None:
            self.failure_log.tell(next(iter(calls.values())).call_id, actor_group.failure)
            raise actor_group.failure.to_error()
        # The same processes run their calls in order; others wait for each other, on every slot.
        after = occupied.find_unfinished(but_for=actor_group)
        different = {id(call): call for call in calls.values()}
        packed = {key: pack_once(call._replace(after=after, timeout_s=_PATIENCE_S)) for key, call in different.items()}
        handles: dict[int, Any] = {}
        answers: dict[int, Any] = {}
        contents: list[Any] = []
        for rank, call in calls.items():
            actor, (message, _) = actor_group.actors[rank], packed[id(call)]
            if spec.returns == "metrics":
                handles[rank] = answers[rank] = actor.run.remote(*message)
            else:
                # The failure log keeps answers, so large results are stored apart: they are freed once nobody needs
                # them.
                answers[rank], left = actor.run_apart.remote(*message)
                contents.append(left)
                if spec.returns != "batch":
                    handles[rank] = ValueHandle(left)
                elif self._joined:
                    handles[rank] = SplitBatchHandle(metadata=answers[rank], contents=left)
                else:
                    handles[rank] = LocalBatchHandle(left)
            actor_group.processes[rank].note_call(f"call {call.call_id} {call.role}.{call.method}", answers[rank])
        first = next(iter(calls.values()))
        inputs = [each for _, inputs in packed.values() for each in inputs]
        references = [each.binary() for each in inputs if isinstance(each, ray.ObjectRef)]
        state = CallState(
            call_id=first.call_id,
            role=group.role,
            method=first.method,
            pool=group.pool,
            actor_group=actor_group,
            answers=answers,
            inputs=self._supervisor.find_makers(references),
            references=references,
            deadline=self._deadline_of(group, first.method),
            failure_log=self.failure_log,
        )
        collected = spec.protocol.collect(group.topology).ranks
        made = RayCall(
            state=state,
            handles=[handles[rank] for rank in collected],
            collected=collected,
            waiter=self._waiter,
            supervisor=self._supervisor,
            store=self._store,
        )
        self.failure_log.watch(answers.values(), made.without_results())
        self._supervisor.watch(state, contents)
        return made

    def _list_actor_groups(self) -> list[ActorGroup]:
        return [actor_group for occupied in self._occupied.values() for actor_group in occupied.actor_groups]

    def _actor_group_of(self, group: WorkerGroup) -> ActorGroup:
        if group not in self._actor_groups:
            raise PoolError(
                f"group {show(group.role)} is closed: its pool {show(group.pool.name)} was released, or it "
                f"could not be built"
            )
        return self._actor_groups[group]


def _start_slicer() -> tuple[Any, str]:
    """An actor on this machine that cuts slices of what the controller puts, and its name."""
    name = f"slicer-{uuid.uuid4().hex[:12]}"
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    slicer: Any = ray.remote(Slicer)
    return slicer.options(name=name, num_cpus=0, scheduling_strategy=here).remote(), name
