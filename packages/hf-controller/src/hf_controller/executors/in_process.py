"""The in-process executor: the same programs without processes, for tests, notebooks and debuggers."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_controller.data.transport import take_slices
from hf_controller.executors.base import Executor, check_constructors, check_pool, check_specs
from hf_controller.executors.rank_copies import RandomStream, TorchModes, copy_object
from hf_controller.executors.shared_process import DefaultGroup, taking_turns
from hf_controller.failure_log import FailureLog
from hf_controller.failures import Failure, LostResultError, describe_end, went_alike
from hf_controller.groups.call import BatchArgument, Call, StoredArgument
from hf_controller.groups.default_group import seed_generators
from hf_controller.groups.resource_pool import ResourcePool
from hf_controller.groups.worker import Worker, WorkerContext, WorkerSpec, construct_worker
from hf_controller.groups.worker_group import WorkerGroup
from hf_controller.signals import SignalGuard
from hf_controller.trace import CallReport, Trace
from hf_protocols import ConfigError, MethodSpec, PoolError, ProtocolError
from hf_protocols.foreign_code import Caught, raised_as
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_controller.data.results import Outcome
    from hf_controller.data.transport import Shard, SliceRequest
    from hf_controller.executors.rank_runtime import CallShare, RankRuntime

__all__ = ["InProcessExecutor", "LocalStore"]

_Acting = Callable[[int], contextlib.AbstractContextManager[None]]
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclasses.dataclass(frozen=True, eq=False)
class _Box:
    """The handle of a stored value."""

    value: Any


class LocalStore:
    """Values of this process. Arrays are copied in, so that a result stays what it was when it was returned."""

    @property
    def origin(self) -> None:
        """Here."""
        return

    def hold(self, value: Any) -> _Box:
        """Stores a value as it is."""
        return _Box(value)

    def put(self, value: Any) -> _Box:
        """Stores copies of a list of arrays."""
        return _Box([array.copy() for array in value])

    def get(self, handles: Sequence[_Box], timeout_s: float) -> list[Any]:
        """The values themselves; of an object that a method returned, a copy."""
        return [_copy_outcome(handle.value) for handle in handles]

    def wait(self, handles: Sequence[_Box], timeout_s: float) -> None:
        """Everything is there already."""

    def is_far(self, origin: None) -> bool:
        """Nothing is."""
        return False

    def request(self, shard: Shard, request: SliceRequest) -> _Box:
        """Cuts the slice at once."""
        return _Box(take_slices(shard.arrays.value, request))


class _LocalCall:
    """A call that already ran."""

    def __init__(
        self,
        outcomes: Mapping[int, Outcome],
        reports: Mapping[int, CallReport],
        collected: Sequence[int],
        failure_log: FailureLog,
    ) -> None:
        self.handles = [_Box(outcomes.get(rank)) for rank in collected]
        self._failed = next((report for report in reports.values() if report.failure is not None), None)
        self._failure_log = failure_log
        self._rows = [reports[rank].num_rows if rank in reports else 0 for rank in collected]

    def wait(self, timeout_s: float | None) -> list[int]:
        if self._failed is not None and (failure := self._failed.failure) is not None:
            self._failure_log.tell(self._failed.span.call_id, failure)
            raise failure.to_error() from failure.exception
        return self._rows

    def outcomes(self, timeout_s: float | None, position: int | None = None) -> list[Outcome]:
        self.wait(timeout_s)
        boxes = self.handles if position is None else [self.handles[position]]
        return [_copy_outcome(box.value) for box in boxes]

    def explain_loss(self, error: LostResultError) -> None:
        """Nothing is lost in one process."""


def _copy_outcome(outcome: Any) -> Any:
    from hf_controller.data.results import Value

    return Value(copy_object(outcome.value)) if isinstance(outcome, Value) else outcome


def _copy_arguments(call: Call) -> Call:
    """The call with plain arguments of its own.

    Raises:
        ProtocolError: for one that cannot be copied.
    """
    given = {f"number {number}": value for number, value in enumerate(call.args, 1)} | dict(call.kwargs)
    copies = list(_copy_named(f"{call.role}.{call.method}", given).values())
    positional = len(call.args)
    return call._replace(
        args=tuple(copies[:positional]), kwargs=dict(zip(call.kwargs, copies[positional:], strict=True))
    )


def _copy_named(what: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the arguments of `what` for one rank. Those that can be copied together share what they shared.

    Raises:
        ProtocolError: for one that cannot be copied.
    """
    plain = {name: value for name, value in given.items() if not isinstance(value, BatchArgument | StoredArgument)}
    with Caught():
        return {**given, **(copy_object(plain) if plain else {})}
    copies = {}
    for name, value in plain.items():
        with raised_as(partial(_describe_uncopied, f"{what}: the argument {name}, a {type(value).__name__}")):
            copies[name] = copy_object(value)
    return {**given, **copies}


def _copy_kwargs(specs: Mapping[str, WorkerSpec]) -> dict[str, dict[str, Any]]:
    """Constructor arguments of the roles that share a process, copied for one rank.

    Raises:
        ProtocolError: for one that cannot be copied.
    """
    with Caught():
        copies: dict[str, dict[str, Any]] = copy_object({role: dict(spec.kwargs) for role, spec in specs.items()})
        return copies
    return {role: _copy_named(f"{role}: {spec.worker.__name__}", spec.kwargs) for role, spec in specs.items()}


class _LocalRank(NamedTuple):
    """One rank of a role, or of fused roles: its workers, the random numbers that they draw, and their torch modes."""

    host: RankRuntime
    stream: RandomStream
    modes: TorchModes

    def copy_arguments(self, call: Call) -> Call:
        """A call with this rank's own arguments; raises the errors of `_copy_arguments`."""
        with self.modes.entered():
            return _copy_arguments(call)

    def close(self) -> None:
        """Closes the workers."""
        with self.modes.entered():
            self.host.close()

    def run(self, call: Call, share: CallShare) -> tuple[Outcome, CallReport]:
        with self.stream.drawn(), self.modes.entered():
            outcome, report = self.host.run(call, share)
        with Caught() as caught:  # an object's own copying may raise anything
            return _copy_outcome(outcome), report
        assert caught.error is not None
        origin = f"call {call.call_id}"
        failure = Failure.of(caught.error, role=call.role, method=call.method, rank=report.span.rank, origin=origin)
        return failure, report._replace(failure=failure, span=report.span._replace(failed=True))


def _describe_uncopied(label: str, error: BaseException) -> ProtocolError:
    return ProtocolError(f"{label}, cannot be copied for a rank ({error})")


def _raise_interrupt(failure: Failure) -> None:
    """Raises an interrupt such as Ctrl-C: it is meant for the whole program, on whose thread a method runs here."""
    if failure.exception is not None and not isinstance(failure.exception, Exception | SystemExit):
        raise failure.exception


class InProcessExecutor(Executor):
    """Runs every call at once, on the thread that makes it: a breakpoint in a worker's method stops there. Use it from
    one thread at a time. The calls of several executors, on threads of their own, wait for each other.

    A group of one rank runs everything, FSDP included: `torch.distributed` gets a gloo group of one rank, which the
    executors of a process share, and which is destroyed when the last of them is closed. The ranks of a larger group
    run one after another, with collective-free methods only: a collective raises at once. As on Ray, a rank has its own
    copies of a constructor's and a call's arguments. It is not in the program's `torch.inference_mode()`, `no_grad()`
    or `autocast()`, and does not have the program's default dtype and device. An exception is raised, as on Ray, when
    the result is requested; its cause is the worker's own exception. The `environment` of a spec is not applied: it
    would change the program's own environment.

    Args:
        device: where the workers' tensors live, for example `"cuda:0"`; None: the pool's kind.

    Raises:
        ConfigError: for a name that is not a device.
    """

    def __init__(self, *, device: str | None = None) -> None:
        super().__init__()
        if device is not None and not _DEVICE.fullmatch(str(device)):
            raise ConfigError(f'device={show(device)}. Use "cpu", "cuda" or "cuda:0", or None for the pool\'s kind')
        self.call_timeout_s = 600.0
        self.failure_log = FailureLog()
        self.trace = Trace(self.failure_log.take_spans)
        self._store = LocalStore()
        self._device = device
        self._hosts: dict[WorkerGroup, list[_LocalRank]] = {}
        self._failed: dict[WorkerGroup, Failure] = {}
        self._default_group = DefaultGroup()
        # A signal that arrives in a method of a worker is for the whole program, which runs on this thread.
        self._guard = SignalGuard(with_interrupts=False)
        self._guard.install()

    def build_groups(
        self, pool: ResourcePool, specs: Mapping[str, WorkerSpec], *, fused: bool = False, wait: bool = True
    ) -> dict[str, WorkerGroup]:
        """Builds one group per role; see `Executor.build_groups`. All is in one process, ready at once.

        Raises:
            ProtocolError: also if a constructor argument cannot be copied.
            WorkerTimeoutError: if another thread's call takes longer than `call_timeout_s`.
        """
        self._check_open()
        check_specs(pool, specs, fused=fused)
        check_constructors(specs)
        self._check_new(pool, specs)
        groups = {role: WorkerGroup(role, spec, pool, self) for role, spec in specs.items()}
        self._check_device(pool)
        joining = [role for role, spec in specs.items() if spec.worker.needs_process_group]
        with taking_turns(self.call_timeout_s), ExitStack() as undo:
            if pool.num_slots == 1 and joining:
                self._join_default_group(pool, joining)
            undo.callback(lambda: self._close([group for group in groups.values() if group in self._hosts]))
            for together in [specs] if fused else [{role: specs[role]} for role in specs]:
                hosts: list[_LocalRank] = []
                self._hosts.update({groups[role]: hosts for role in together})
                with _ranks_in_turn(pool.num_slots) as acting:
                    for rank in range(pool.num_slots):
                        with self._guard.watching():
                            hosts.append(self._build_rank(pool, together, rank, acting))
            undo.pop_all()
        return groups

    def wait_until_ready(self) -> None:
        """Returns at once: groups are ready when they are built."""

    def release(self, pool: ResourcePool) -> None:
        """Closes every group on `pool`."""
        check_pool(pool)
        self._close([group for group in self._hosts if group.pool is pool])

    def built_on(self, pool: ResourcePool) -> list[dict[str, WorkerSpec]]:
        """Returns the roles on `pool`; see `Executor.built_on`."""
        together: dict[int, dict[str, WorkerSpec]] = {}
        for group, hosts in self._hosts.items():
            if group.pool is pool:
                together.setdefault(id(hosts), {})[group.role] = group.spec
        return list(together.values())

    def close(self) -> None:
        """Closes every worker and leaves the process group.

        Raises:
            WorkerTimeoutError: if another thread's call takes longer than `call_timeout_s`; nothing is closed then.
        """
        if self._closed:
            return
        try:
            with taking_turns(self.call_timeout_s):
                self._closed = True
                try:
                    for pool in {group.pool for group in self._hosts}:
                        self.release(pool)
                finally:
                    self._hosts.clear()
                    self._leave_default_group()
        finally:
            self._guard.restore()

    def _close(self, groups: Sequence[WorkerGroup]) -> None:
        """Ends whole sets of fused groups, or groups that are not fused."""
        with taking_turns(self.call_timeout_s):
            ranks = {id(rank): rank for group in groups for rank in self._hosts.pop(group)}
            self._failed = {group: each for group, each in self._failed.items() if group in self._hosts}
            for rank in ranks.values():
                rank.close()
            self._leave_default_group()

    def _join_default_group(self, pool: ResourcePool, roles: Sequence[str]) -> None:
        larger = [group.role for group in self._hosts if group.world_size > 1]
        if larger:
            raise ProtocolError(
                f"{', '.join(roles)} on one rank cannot have a default process group in one process with "
                f"{', '.join(larger)} on several ranks. Set needs_process_group = False in the worker class of "
                f"{', '.join(roles)} if it calls no collective, or use RayExecutor"
            )
        self._default_group.join(device=self._device_of(pool), timeout_s=self.call_timeout_s)

    def _leave_default_group(self) -> None:
        """Leaves the default group once no worker group of this executor uses it: larger ones cannot use it."""
        if not any(group.world_size == 1 and group.spec.worker.needs_process_group for group in self._hosts):
            self._default_group.leave()

    def _build_rank(
        self, pool: ResourcePool, specs: Mapping[str, WorkerSpec], rank: int, acting: _Acting
    ) -> _LocalRank:
        """Builds one rank: the workers of all roles that share its process."""
        from hf_controller.executors.rank_runtime import RankRuntime, close_workers

        device = self._device_of(pool)
        stream, modes = RandomStream(device), TorchModes(device)
        workers: dict[str, Worker] = {}
        with modes.entered():
            kwargs = _copy_kwargs(specs)
        for role, spec in specs.items():
            context = WorkerContext(
                role=role,
                rank=rank,
                world_size=pool.num_slots,
                topology=spec.topology,
                device=device,
                seed=spec.seed,
                pool=pool.name,
            )
            with Caught(also=(SystemExit,)) as caught, stream.drawn(), modes.entered(), acting(rank):
                seed_generators(spec.seed)
                workers[role] = construct_worker(replace(spec, kwargs=kwargs[role]), context)
            if caught.error is not None:
                with modes.entered():
                    close_workers(workers, rank)
                raise Failure.of(caught.error, role=role, method="__init__", rank=rank).to_error() from caught.error
        name = "+".join(specs)
        host = RankRuntime(pool=pool.name, name=name, rank=rank, workers=workers, specs=specs, store=self._store)
        return _LocalRank(host, stream, modes)

    def _launch(self, group: WorkerGroup, spec: MethodSpec, calls: Mapping[int, Call]) -> _LocalCall:
        from hf_controller.executors.rank_runtime import CallShare

        if group not in self._hosts:
            raise PoolError(f"group {group.role!r} is closed: its pool {group.pool.name!r} was released")
        if group in self._failed:
            raise self._failed[group].to_error() from self._failed[group].exception
        outcomes: dict[int, Outcome] = {}
        reports: dict[int, CallReport] = {}
        hosts = self._hosts[group]
        share = CallShare(spec, group.topology)
        with taking_turns(self.call_timeout_s), _ranks_in_turn(group.world_size) as acting:
            copies = {rank: hosts[rank].copy_arguments(call) for rank, call in calls.items()}
            for rank, call in copies.items():
                with self._guard.watching(), acting(rank):
                    outcomes[rank], reports[rank] = hosts[rank].run(call, share)
                failure = reports[rank].failure
                if failure is not None:
                    _raise_interrupt(failure)
        reports = self._judge(group, reports)
        self.failure_log.note(reports.values(), group.pool)
        collected = spec.protocol.collect(group.topology).ranks
        return _LocalCall(outcomes, reports, collected, self.failure_log)

    def _judge(self, group: WorkerGroup, reports: dict[int, CallReport]) -> dict[int, CallReport]:
        """Marks a group as failed if its ranks would not have met any more; returns the reports with a note of that."""
        failures = {rank: each.failure for rank, each in reports.items() if each.failure is not None}
        together = [each for each, hosts in self._hosts.items() if hosts is self._hosts[group]]
        meets_peers = any(each.spec.worker.needs_process_group for each in together)
        passed_on = [rank for rank in failures if reports[rank].upstream]
        if not meets_peers or len(reports) < group.world_size or went_alike(reports, failures, passed_on):
            return reports
        note = describe_end([each.role for each in together], "", [group.pool.name])
        noted = {rank: replace(each, note=note) for rank, each in failures.items()}
        self._failed |= dict.fromkeys(together, noted[min(noted)])
        return {rank: each._replace(failure=noted.get(rank)) for rank, each in reports.items()}

    def _check_device(self, pool: ResourcePool) -> None:
        import torch

        if self._device_of(pool) != "cpu" and not torch.cuda.is_available():
            raise PoolError(
                f"pool {pool.name!r} wants {self._device_of(pool)} and torch finds no CUDA device here. Use "
                'ResourcePool(..., device="cpu"), or install a CUDA build of torch'
            )

    def _device_of(self, pool: ResourcePool) -> str:
        return self._device or ("cpu" if pool.device == "cpu" else "cuda:0")


@contextlib.contextmanager
def _ranks_in_turn(world_size: int) -> Iterator[_Acting]:
    """Yields a function from a rank to a block in which `torch.distributed` takes this process for that rank."""
    if world_size == 1:
        yield lambda rank: contextlib.nullcontext()
        return
    from hf_controller.executors.no_collectives import RanksInTurn

    with RanksInTurn(world_size) as ranks:
        yield ranks.acting
