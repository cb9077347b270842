"""The actor: the process of one rank, driven by calls, and the streams that label its lines."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

import ray
from ray import cloudpickle

from hf_controller.executors.ray.actor_ref import Location, find_location, own_origin
from hf_controller.executors.ray.store import RankStore
from hf_controller.executors.ray.wire import CallServer
from hf_controller.failures import Failure
from hf_controller.groups.default_group import (
    Rendezvous,
    call_off,
    join_default_group,
    join_joint_group,
    leave_joint_group,
    open_rendezvous,
    seed_generators,
)
from hf_controller.groups.worker import Connection, Worker, WorkerContext, WorkerSpec, construct_worker
from hf_protocols import read_machine_limits

if TYPE_CHECKING:
    from hf_controller.data.transport import SliceReply, SliceRequest

__all__ = ["Construction", "Joining", "PrefixedStream", "RankActor", "Slicer", "attribute_streams"]


class Slicer:
    """Cuts slices on the controller's machine, for what the controller put."""

    def cut(self, arrays: list[Any], request: SliceRequest) -> SliceReply:
        """Cuts a slice of a shard that is on this machine."""
        return _cut(arrays, request)


@dataclass(frozen=True, kw_only=True)
class Construction:
    """Settings that build an actor group; equal on all of its ranks.

    Attributes:
        specs: pickled `{role: WorkerSpec}`.
        import_path: folders where modules of the program are looked for after a process's own.
        pool: the pool's name.
        device: `"cpu"` or `"cuda"`.
        slots: slots on each machine.
        environment: variables to set.
        threads: OMP_NUM_THREADS of the program; None where it is not set.
        process_group: whether a worker needs the default process group.
        on_one_machine: whether all ranks share a machine.
        collective_timeout_s: deadline of every collective.
        start_timeout_s: deadline of the ranks' meeting.
    """

    specs: bytes
    import_path: tuple[str, ...]
    pool: str
    device: str
    slots: tuple[int, ...]
    environment: Mapping[str, str]
    threads: str | None
    process_group: bool
    on_one_machine: bool
    collective_timeout_s: float
    start_timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Joining:
    """Settings of a connection, for the ranks of one role.

    Attributes:
        name: the connection's name.
        token: distinguishes this attempt from others of the same name.
        role: this rank's role.
        ranks: the joint ranks of both roles.
        device: `"cpu"` for gloo, a CUDA device for nccl.
        on_one_machine: whether all ranks share a machine.
        timeout_s: deadline of meeting, and of every collective.
    """

    name: str
    token: str
    role: str
    ranks: Mapping[str, tuple[int, ...]]
    device: str
    on_one_machine: bool
    timeout_s: float


class RankActor(CallServer):
    """One rank's process. Calls run one after another; questions about the process are answered while a call runs.

    Args:
        name: the actor group's name: its roles.
        rank: this rank.
        world_size: ranks of the actor group.
        slicer: the name under which other machines ask this process for slices; None where there are none.
    """

    def __init__(self, name: str, rank: int, world_size: int, slicer: str | None) -> None:
        super().__init__(name, rank, slicer)
        self._world_size = world_size
        self._workers: dict[str, Worker] = {}
        self._rendezvous_stores: dict[str, Any] = {}
        self._given_up: set[str] = set()
        self._thread: int | None = None

    def __repr__(self) -> str:
        # Ray puts this name before every printed line; the line itself has role and rank.
        return "host"

    @ray.method(concurrency_group="service")
    def open_rendezvous(self, token: str, on_one_machine: bool) -> Rendezvous:
        """Listens for other ranks. It is called before or after the workers' construction, not during it: two threads
        that import torch at once fail.
        """
        address = "127.0.0.1" if on_one_machine else ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        rendezvous, store = open_rendezvous(str(address), token)
        if token not in self._given_up:
            self._rendezvous_stores[token] = store
        return rendezvous

    @ray.method(concurrency_group="service")
    def give_up(self, name: str, token: str) -> None:
        """Cancels a connection: ranks that wait get an error, ranks that come later do not wait."""
        self._given_up.add(token)
        store = self._rendezvous_stores.get(token)
        if store is not None:
            call_off(name, store)
            self._rendezvous_stores.pop(token, None)

    def construct(self, construction: Construction, rendezvous: Rendezvous | None) -> Failure | None:
        """Joins the process group and constructs every worker; a failure is returned, not raised."""
        self._thread = threading.get_ident()
        self._pool = construction.pool
        attribute_streams(lambda: f"{self._role}/{self._rank}")
        sys.path += [folder for folder in construction.import_path if folder not in sys.path]
        try:
            specs: Mapping[str, WorkerSpec] = cloudpickle.loads(construction.specs)
            device = "cpu" if construction.device == "cpu" else "cuda:0"
            self._prepare(construction, device, rendezvous)
            for role, spec in specs.items():
                self._role = role
                self._workers[role] = self._construct_worker(role, spec, construction, device)
        except BaseException as error:  # noqa: BLE001 - the executor boundary: any exception travels to the controller
            failure = Failure.of(error, role=self._role, method="__init__", rank=self._rank, origin=own_origin())
            self._unbuilt = replace(failure, exception=None)
            return self._unbuilt
        from hf_controller.executors.rank_runtime import RankRuntime

        self._runtime = RankRuntime(
            pool=construction.pool,
            name=self._name,
            rank=self._rank,
            workers=self._workers,
            specs=specs,
            store=RankStore(self._slicer),
        )
        self._role = self._name
        # What was imported and built never becomes garbage: collections need not look at it again.
        gc.freeze()
        return None

    def connect(self, joining: Joining, rendezvous: Rendezvous) -> Failure | None:
        """Joins the ranks of another group, once the workers are constructed; a failure is returned, not raised."""
        if joining.token in self._given_up:
            return None  # an earlier call took until after the deadline, and nobody waits for this answer
        try:
            self._runtime.enter(f"joining the connection {joining.name!r}")
            rank = joining.ranks[joining.role][self._rank]
            world_size = sum(map(len, joining.ranks.values()))
            group = join_joint_group(
                joining.name,
                rank,
                world_size,
                device=joining.device,
                timeout_s=joining.timeout_s,
                rendezvous=rendezvous,
                store=self._rendezvous_stores.get(joining.token),
                on_one_machine=joining.on_one_machine,
            )
        except Exception as error:  # noqa: BLE001 - the executor boundary: any exception travels to the controller
            return Failure.of(error, role=joining.role, method="connect", rank=self._rank)
        finally:
            self._runtime.enter("idle")
        self._rendezvous_stores.pop(joining.token, None)  # the group has it, and takes it along
        self._workers[joining.role].context.connections[joining.name] = Connection(
            name=joining.name, group=group, rank=rank, world_size=world_size, ranks=joining.ranks
        )
        return None

    def disconnect(self, role: str, name: str) -> None:
        """Leaves a connection whose other side is gone, if this rank ever joined it."""
        connection = self._workers[role].context.connections.pop(name, None)
        if connection is not None:
            leave_joint_group(connection.group)

    @ray.method(concurrency_group="service")
    def describe(self) -> tuple[str, str]:
        """Returns this rank's activity and the Python stack of its call; works while a call runs."""
        stage = str(self._runtime.stage) if self._runtime is not None else "being constructed"
        frame = sys._current_frames().get(self._thread or -1)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        return stage, stack

    @ray.method(concurrency_group="service")
    def locate(self) -> Location:
        """Returns the location of this process."""
        return find_location()

    @ray.method(concurrency_group="slices")
    def cut(self, arrays: list[Any], request: SliceRequest) -> SliceReply:
        """Cuts a slice of a shard that is on this machine."""
        return _cut(arrays, request)

    def close(self) -> None:
        """Closes every worker and leaves the process group."""
        if self._runtime is not None:
            self._runtime.close()

    def _prepare(self, construction: Construction, device: str, rendezvous: Rendezvous | None) -> None:
        os.environ.update(_torchrun_environment(self._rank, construction, rendezvous))
        os.environ.update(construction.environment)
        import torch

        # This thread runs every call; torch counts threads per calling thread.
        torch.set_num_threads(_choose_threads(construction, int(os.environ["LOCAL_WORLD_SIZE"])))
        if construction.process_group:
            join_default_group(
                self._rank,
                self._world_size,
                device=device,
                timeout_s=construction.collective_timeout_s,
                meeting_timeout_s=construction.start_timeout_s,
                rendezvous=rendezvous,
                store=None if rendezvous is None else self._rendezvous_stores.get(rendezvous.token),
                on_one_machine=construction.on_one_machine,
            )

    def _construct_worker(self, role: str, spec: WorkerSpec, construction: Construction, device: str) -> Worker:
        seed_generators(spec.seed)
        context = WorkerContext(
            role=role,
            rank=self._rank,
            world_size=self._world_size,
            topology=spec.topology,
            device=device,
            seed=spec.seed,
            pool=construction.pool,
        )
        return construct_worker(spec, context)


def _torchrun_environment(rank: int, construction: Construction, rendezvous: Rendezvous | None) -> dict[str, str]:
    """Returns the variables that torchrun sets, and hides GPUs from a model's ranks on the host.

    A GPU process sees its own GPU only, as number 0. Ray hides none from a process that asked for no GPU.
    """
    machine_of = [machine for machine, count in enumerate(construction.slots) for _ in range(count)]
    machine = machine_of[rank]
    local_rank, local_size = rank - machine_of.index(machine), construction.slots[machine]
    if construction.device != "cpu":
        local_rank, local_size = 0, 1
    met = {} if rendezvous is None else {"MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port)}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(machine_of)),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        **met,
        **({"CUDA_VISIBLE_DEVICES": ""} if construction.device == "cpu" and construction.process_group else {}),
    }


def _choose_threads(construction: Construction, local_size: int) -> int:
    """Returns torch's threads in a rank: OMP_NUM_THREADS, or else a host rank's share of the cores, and 1 with a GPU.

    Ranks without a process group have 1, because they share the machine with those that have one. Ray sets
    OMP_NUM_THREADS in every worker, so only the program's own or the role's counts.
    """
    given = construction.environment.get("OMP_NUM_THREADS", construction.threads or "").partition(",")[0].strip()
    if given.isdecimal() and int(given):
        return int(given)
    if construction.device != "cpu" or not construction.process_group:
        return 1
    return max(1, read_machine_limits().num_cpus // local_size)


def _cut(arrays: list[Any], request: SliceRequest) -> SliceReply:
    """Cuts a slice out of the arrays behind the one handle in `arrays`."""
    from hf_controller.data.transport import take_slices

    value = ray.get(arrays[0])
    return take_slices(value[1] if isinstance(value, tuple) else value, request)


class PrefixedStream:
    """A text stream that writes whole lines to `target`, each with a label in front.

    Args:
        target: where lines go.
        label: returns the label of the moment, such as `"actor/0"`.
    """

    def __init__(self, target: TextIO, label: Callable[[], str]) -> None:
        self._target = target
        self._label = label
        self._lock = threading.Lock()
        self._unfinished = ""

    def write(self, text: str) -> int:
        """Keeps `text` until its line ends, then writes the line at once."""
        with self._lock:
            *lines, self._unfinished = (self._unfinished + text).split("\n")
            if lines:
                label = self._label()
                self._target.write("".join(f"[{label}] {line}\n" for line in lines))
                self._target.flush()
        return len(text)

    def flush(self) -> None:
        """Flushes the complete lines; an unfinished line waits for its end."""
        self._target.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def attribute_streams(label: Callable[[], str]) -> None:
    """Sends this process's standard output and error, labelled, to standard error."""
    target = sys.stderr
    sys.stdout = PrefixedStream(target, label)
    sys.stderr = PrefixedStream(target, label)
