"""The distributed executor: one Ray actor per rank, direct data flow between them."""

from __future__ import annotations

import dataclasses
import functools
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hf_controller.dispatch import Call
from hf_controller.executors.base import Executor, check_pool, check_specs
from hf_controller.executors.ray.actor import Joining, Slicer
from hf_controller.executors.ray.causes import Causes, SentCall
from hf_controller.executors.ray.cluster import Cluster
from hf_controller.executors.ray.host_process import HostProcess, describe_processes
from hf_controller.executors.ray.host_set import HostSet, Undone, await_answers, await_ready
from hf_controller.executors.ray.inquirer import Inquirer
from hf_controller.executors.ray.pending import RayCall, take_ready
from hf_controller.executors.ray.placement import PlacedPool, place
from hf_controller.executors.ray.shipping import PackedRoles, pack_roles
from hf_controller.executors.ray.store import BatchHandle, RayStore, ValueHandle
from hf_controller.executors.ray.waiting import Waiter
from hf_controller.executors.ray.wire import pack_call
from hf_controller.resource_pool import ResourcePool
from hf_controller.signals import SignalGuard, shielded
from hf_controller.trace import Trace
from hf_controller.worker import WorkerSpec
from hf_controller.worker_group import WorkerGroup
from hf_protocols import ConfigError, MethodSpec, PoolError, ProtocolError
from hf_protocols.arguments import check_count, check_kind, check_seconds, show

__all__ = ["RayExecutor"]

_CLOSE_TIMEOUT_S = 5.0
_MAX_SENT_BYTES = 8 * 1024
_MIN_STORE_BYTES = 75 * 2**20
"""Ray's own bound."""


@dataclasses.dataclass
class _Occupied:
    """A pool in use: its slots and its processes."""

    placed: PlacedPool
    host_sets: list[HostSet] = dataclasses.field(default_factory=list)

    def find_unfinished(self, but_for: HostSet | None = None) -> list[Any]:
        """Answers that are there once every call on the pool is over, or every one of other processes."""
        host_sets = [host_set for host_set in self.host_sets if host_set is not but_for]
        last = [process.last_answer for host_set in host_sets for process in host_set.processes]
        answers = [answer for answer in last if answer is not None]
        return ray.wait(answers, num_returns=len(answers), timeout=0, fetch_local=False)[1] if answers else []


class RayExecutor(Executor):
    """Runs groups on Ray: by default on a cluster of its own on this machine, never on a foreign one by accident.

    Args:
        address: ``"local"`` starts a cluster and ignores ``RAY_ADDRESS``; anything else joins that cluster.
        num_cpus: slots of CPU pools that the local cluster offers, however many cores there are; None: one per
            core that this process may use.
        object_store_bytes: shared memory of the local cluster, reserved as it is used.
        start_timeout_s: deadline of placing a pool and constructing its workers.
        call_timeout_s: how long a result is waited for by default, and how long a rank waits for its turn. Naming
            those who are late, and what they are at, takes up to 25 s more.
        collective_timeout_s: deadline of a collective in the default process groups.
        log_to_driver: show what workers print, with role and rank, on standard error. Lines of several
            ranks that differ in numbers only are collected by Ray for some seconds and may be shown as one with a
            count; ``RAY_DEDUP_LOGS=0`` in the environment shows each at once.
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
        deadlines = {"start": start_timeout_s, "call": call_timeout_s, "collective": collective_timeout_s}
        for name, timeout_s in deadlines.items():
            check_seconds(ConfigError, f"{name}_timeout_s", timeout_s)
        check_kind(ConfigError, "address", address, str, '"local", "auto" or the address of a cluster')
        if num_cpus is not None:
            check_count(ConfigError, "num_cpus", num_cpus)
        check_count(ConfigError, "object_store_bytes", object_store_bytes, least=_MIN_STORE_BYTES)
        self.call_timeout_s = call_timeout_s
        self.trace = Trace(take_ready)
        self._start_timeout_s = start_timeout_s
        self._collective_timeout_s = collective_timeout_s
        self._occupied: dict[ResourcePool, _Occupied] = {}
        self._host_sets: dict[WorkerGroup, HostSet] = {}
        self._guard = SignalGuard()
        self._waiter = Waiter(self._guard)
        self._inquirer = Inquirer()
        self._cluster = Cluster(
            address=address, num_cpus=num_cpus, object_store_bytes=object_store_bytes, log_to_driver=log_to_driver
        )
        self._joined = address != "local"
        # Joined clusters have other machines, whose ranks ask for slices of what the controller puts.
        self._slicer: Any
        self._slicer, slicer_name = _start_slicer() if self._joined else (None, None)
        self._store = self._ray_store = RayStore(slicer_name)
        self._guard.install()

    def build_groups(
        self, pool: ResourcePool, specs: Mapping[str, WorkerSpec], *, fused: bool = False, wait: bool = True
    ) -> dict[str, WorkerGroup]:
        """Build one group per role; see :meth:`Executor.build_groups`."""
        self._check_open()
        check_specs(pool, specs, fused=fused)
        self._check_new(pool, specs)
        groups = {role: WorkerGroup(role, spec, pool, self) for role, spec in specs.items()}
        packed = [pack_roles(roles) for roles in ([specs] if fused else [{role: specs[role]} for role in specs])]
        if pool not in self._occupied:
            placed = place(pool, self._start_timeout_s, own=list(self._occupied), on_distinct_machines=self._joined)
            self._occupied[pool] = _Occupied(placed)
        built: list[HostSet] = []
        try:
            for each in packed:
                built.append(self._start(pool, each))
                self._host_sets |= {groups[role]: built[-1] for role in each.roles}
            undone = self._await_ready(built) if wait else None
            if undone is not None:
                raise undone.error
        except BaseException as error:
            # Nobody has a group of these to call.
            error.add_note(self._end(pool, built, orderly=False))
            raise
        return groups

    def wait_until_ready(self) -> None:
        """Wait until every worker is constructed; see :meth:`Executor.wait_until_ready`."""
        undone = self._await_ready(self._list_host_sets())
        if undone is None:
            return
        for pool, occupied in list(self._occupied.items()):
            failed = [each for each in occupied.host_sets if any(p in undone.processes for p in each.processes)]
            if failed:
                undone.error.add_note(self._end(pool, failed, orderly=False))
        raise undone.error

    def connect(self, first: WorkerGroup, second: WorkerGroup, name: str) -> None:
        """Join two groups in one process group; see :func:`hf_controller.connect`.

        `start_timeout_s` bounds what is left of their construction, and then the joining.
        """
        host_sets = [self._host_set_of(group) for group in (first, second)]
        if host_sets[0] is host_sets[1]:
            raise ProtocolError(f"{first.role} and {second.role} share their processes: they have one group already")
        if first.pool is second.pool:
            raise ProtocolError(
                f"{first.role} and {second.role} stand on one pool ({show(first.pool.name)}) and take "
                f"turns, so they never "
                "meet in a collective: give each a pool of its own, or fuse them (fused=True)"
            )
        if first.role == second.role:
            raise ProtocolError(f"both groups have the role {show(first.role)}, which tells a connection's sides apart")
        for group, host_set in zip((first, second), host_sets, strict=True):
            host_set.check_connection(group.role, name)
        nodes = self._occupied[first.pool].placed.nodes | self._occupied[second.pool].placed.nodes
        border, end = first.world_size, first.world_size + second.world_size
        joining = Joining(
            name=name,
            token=uuid.uuid4().hex,
            role=first.role,
            ranks={first.role: tuple(range(border)), second.role: tuple(range(border, end))},
            device="cpu" if "cpu" in (first.pool.device, second.pool.device) else "cuda:0",
            on_one_machine=len(nodes) == 1,
            timeout_s=self._collective_timeout_s,
        )
        joinings = [dataclasses.replace(joining, role=group.role) for group in (first, second)]
        # A rank that waits for its partners has a deadline, which their construction does not count towards.
        undone = self._await_ready(host_sets)
        if undone is not None:
            raise undone.error
        try:
            self._join(joinings, host_sets)
        except BaseException:  # Ctrl-C too
            for each, host_set in zip(joinings, host_sets, strict=True):
                host_set.give_up(each)
            raise
        for each, host_set, other in zip(joinings, host_sets, reversed(host_sets), strict=True):
            host_set.keep_connection(each.role, name, other)

    def _join(self, joinings: Sequence[Joining], host_sets: Sequence[HostSet]) -> None:
        """Have the ranks of two host sets meet, within one deadline."""
        await_all = functools.partial(
            await_answers,
            method="connect",
            timeout_s=self._start_timeout_s,
            waiter=self._waiter,
            inquirer=self._inquirer,
            since_s=time.monotonic(),
        )
        # Waited for here: in the ranks' queues it would hold up their later calls for as long as it does not come.
        opener = host_sets[0].processes[0]
        joining = joinings[0]
        opened = opener.actor.open_rendezvous.remote(joining.token, joining.on_one_machine)
        undone = await_all({opened: opener})
        if undone is None:
            asked = [each.connect(joining, ray.get(opened)) for each, joining in zip(host_sets, joinings, strict=True)]
            undone = await_all({handle: process for answers in asked for handle, process in answers.items()})
        if undone is not None:
            raise undone.error

    def describe(self, group: WorkerGroup, timeout_s: float = 5.0) -> dict[int, str]:
        """What each rank is at; see :meth:`Executor.describe`."""
        check_kind(PoolError, "group", group, WorkerGroup, "a group of this executor")
        return describe_processes(dict(enumerate(self._host_set_of(group).processes)), self._inquirer, timeout_s)

    def built_on(self, pool: ResourcePool) -> list[dict[str, WorkerSpec]]:
        """The roles on ``pool``; see :meth:`Executor.built_on`."""
        return [dict(host_set.roles) for host_set in self._occupied[pool].host_sets] if pool in self._occupied else []

    def release(self, pool: ResourcePool) -> None:
        """Close every group on ``pool`` and give its slots back. Processes that do not answer in time are killed."""
        check_pool(pool)
        if pool in self._occupied:
            try:
                self._explain_failures()
            finally:
                self._end(pool, self._occupied[pool].host_sets, orderly=True)

    def _explain_failures(self) -> None:
        """Look for why calls failed, while processes live that were not at fault; for some seconds."""
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for call in self.trace.find_failed():
            if time.monotonic() < deadline_s:
                call.finish()

    def close(self) -> None:
        """End every worker, give all slots back and stop the cluster if it is our own, in a few seconds.

        The folder with the cluster's logs goes with it, unless a rank's process was lost or an error is raised.
        """
        self._close(orderly=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception ranks may hang in a collective, so nobody is asked to finish.
        orderly, keeps_logs = False, kind is None or issubclass(kind, Exception)
        try:
            if kind is None and not self._closed:
                self._end_calls()
                orderly, keeps_logs = True, False
        finally:
            self._close(orderly=orderly, keeps_logs=keeps_logs)

    def _finish_calls(self) -> None:
        late: set[ResourcePool] = set()
        for call in self.trace.find_unsettled():
            # Where one is late, those behind it wait for it.
            if call.pool not in late and not call.finish():
                late.add(call.pool)

    def _start(self, pool: ResourcePool, packed: PackedRoles) -> HostSet:
        host_set = HostSet(
            self._occupied[pool].placed,
            packed,
            cuts_slices=self._joined,
            collective_timeout_s=self._collective_timeout_s,
            start_timeout_s=self._start_timeout_s,
        )
        self._occupied[pool].host_sets.append(host_set)
        return host_set

    def _await_ready(self, host_sets: Sequence[HostSet]) -> Undone | None:
        return await_ready(host_sets, self._start_timeout_s, self._waiter, self._inquirer)

    def _end(self, pool: ResourcePool, host_sets: Sequence[HostSet], *, orderly: bool) -> str:
        """End some of a pool's groups, and give its slots back with the last one; says what became of them."""
        occupied = self._occupied[pool]
        left = [host_set for host_set in occupied.host_sets if host_set not in host_sets]
        _end_processes(occupied, host_sets, orderly=orderly)
        for host_set in self._list_host_sets():
            if host_set not in host_sets:
                host_set.disconnect_all(host_sets)
        self._host_sets = {group: each for group, each in self._host_sets.items() if each not in host_sets}
        occupied.host_sets = left
        if not left:
            occupied.placed.remove()
            del self._occupied[pool]
        ended = ", ".join(role for host_set in host_sets for role in host_set.roles) or "no group"
        stand = ", ".join(role for host_set in left for role in host_set.roles)
        others = f"its other groups stand: {stand}" if stand else "it has no other group and gave its slots back"
        return f"on pool {show(pool.name)} was ended: {ended}; {others}. build_groups(...) builds on it again"

    def _close(self, *, orderly: bool, keeps_logs: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        # Errors name the logs of processes that are gone.
        keeps_logs = keeps_logs or any(process.was_lost for process in self._list_processes())
        with shielded():
            try:
                self.trace.drain()
                for occupied in self._occupied.values():
                    _end_processes(occupied, occupied.host_sets, orderly=orderly)
                    if self._joined:
                        # Our own cluster ends with us.
                        occupied.placed.remove()
            finally:
                self._occupied.clear()
                self._host_sets.clear()
                self._ray_store.close()
                self._waiter.close()
                self._cluster.stop(keeps_logs=keeps_logs)
                self._guard.restore()

    def _launch(self, group: WorkerGroup, spec: MethodSpec, calls: Mapping[int, Call]) -> RayCall:
        host_set, occupied = self._host_set_of(group), self._occupied[group.pool]
        # The same processes run their calls in order; others wait for each other, on every slot.
        after = occupied.find_unfinished(but_for=host_set)
        different = {id(call): call for call in calls.values()}
        packed = {key: _pack_once(call._replace(after=after) if after else call) for key, call in different.items()}
        handles: dict[int, Any] = {}
        answers: dict[int, Any] = {}
        for rank, call in calls.items():
            actor, message = host_set.actors[rank], packed[id(call)]
            if spec.returns == "metrics":
                handles[rank] = answers[rank] = actor.run.remote(*message)
            else:
                # The trace holds on to answers: what is large stays apart, and goes when nobody wants it any more.
                answers[rank], contents = actor.run_apart.remote(*message)
                metadata = answers[rank] if self._joined else None
                is_batch = spec.returns == "batch"
                handles[rank] = BatchHandle(metadata=metadata, contents=contents) if is_batch else ValueHandle(contents)
            host_set.processes[rank].note_call(f"call {call.call_id} {call.role}.{call.method}", answers[rank])
        collected = spec.protocol.collect(group.topology).ranks
        first = next(iter(calls.values()))
        processes = {rank: host_set.processes[rank] for rank in calls}
        sent = SentCall(
            call_id=first.call_id, role=group.role, method=first.method, processes=processes, answers=answers
        )
        connected = host_set.list_connected()
        made = RayCall(
            sent=sent,
            pool=group.pool,
            handles=[handles[rank] for rank in collected],
            inputs=[reference.binary() for message in packed.values() for reference in message[2:]],
            collected=collected,
            timeout_s=self.call_timeout_s,
            waiter=self._waiter,
            causes=Causes(sent, connected=connected, everyone=self._list_processes, inquirer=self._inquirer),
            store=self._store,
            trace=self.trace,
        )
        self.trace.watch(answers.values(), made.without_results())
        return made

    def _list_processes(self) -> list[HostProcess]:
        return [process for host_set in self._list_host_sets() for process in host_set.processes]

    def _list_host_sets(self) -> list[HostSet]:
        return [host_set for occupied in self._occupied.values() for host_set in occupied.host_sets]

    def _host_set_of(self, group: WorkerGroup) -> HostSet:
        if group not in self._host_sets:
            raise PoolError(
                f"group {show(group.role)} is closed: its pool {show(group.pool.name)} was released, or it "
                f"could not be built"
            )
        return self._host_sets[group]


def _pack_once(call: Call) -> tuple[Any, ...]:
    """A rank's message. One that names many rows is stored once for all ranks rather than sent to each."""
    packed = pack_call(call)
    if len(packed.packed) > _MAX_SENT_BYTES:
        packed = packed._replace(packed=ray.put(packed.packed))
    return packed.message


def _start_slicer() -> tuple[Any, str]:
    """An actor on this machine that cuts slices of what the controller puts, and its name."""
    name = f"slicer-{uuid.uuid4().hex[:12]}"
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    slicer: Any = ray.remote(Slicer)
    return slicer.options(name=name, num_cpus=0, scheduling_strategy=here).remote(), name


def _end_processes(occupied: _Occupied, host_sets: Sequence[HostSet], *, orderly: bool) -> None:
    # Ranks that are still at a call may never answer.
    if orderly and not occupied.find_unfinished():
        for host_set in host_sets:
            host_set.close(_CLOSE_TIMEOUT_S)
    for host_set in host_sets:
        host_set.kill()
