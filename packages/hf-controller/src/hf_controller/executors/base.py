"""Common base of all executors: builds groups, and completes their calls when it is left."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hf_controller.data.expressions import Source
from hf_controller.failures import Deadline
from hf_controller.groups.resource_pool import ResourcePool
from hf_controller.groups.worker import WorkerSpec
from hf_controller.groups.worker_group import Dispatcher, WorkerGroup
from hf_protocols import ConfigError, HybridFlowError, PoolError, ProtocolError, Topology
from hf_protocols.foreign_code import Caught
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_controller.data.futures import BatchFuture

__all__ = ["Executor", "check_constructors", "check_deadline", "check_pool", "check_specs", "close_after"]

_check_config = Checks(ConfigError)
_check_pool = Checks(PoolError)
_check_protocol = Checks(ProtocolError)


class Executor(Dispatcher):
    """Builds worker groups on pools and runs their calls. A context manager: leaving it closes everything.

    If the block ends without an exception, its calls are completed first. They are waited for one after another, each
    as long as its result would be, except calls that were already reported as late. The first failure that was not
    reported is then raised, with a note of the line that made the call.

    After an exception, and in `close`, calls that are not over end at once, and failures are not looked for. The
    exception stays the one that is raised.

    Attributes:
        trace: the spans of all calls.
        failure_log: their failures, and which of them the program knows.
        call_timeout_s: deadline of a call without a deadline of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._phase_deadline: Deadline | None = None

    @abstractmethod
    def build_groups(
        self, pool: ResourcePool, specs: Mapping[str, WorkerSpec], *, fused: bool = False, wait: bool = True
    ) -> dict[str, WorkerGroup]:
        """Builds one group per role on the pool's slots, and waits until every worker is constructed.

        Without `wait` construction goes on in the background, so that several pools start together: `wait_until_ready`
        then waits for all of them. A call on a group that is not ready waits for its turn. After an error none of these
        groups exists; groups that were on the pool before stay.

        Groups on one pool take turns. `fused` puts all of these roles into one process per slot, where they share
        the default process group; else each role has its own process per slot.

        Raises:
            PoolError: for a topology that does not fit the pool, or slots that the cluster does not have.
            HybridFlowError: what a worker's constructor raised.
        """

    @abstractmethod
    def wait_until_ready(self) -> None:
        """Waits until the workers of all groups are constructed.

        Raises:
            HybridFlowError: what a worker's constructor raised. Its group is then ended, with the roles that share its
                processes; all other groups stay. A note on the error says which.
            WorkerTimeoutError: if workers are not constructed in time; their groups are then ended.
        """

    @abstractmethod
    def release(self, pool: ResourcePool) -> None:
        """Closes every group on `pool` and gives its slots back; the pool can then be built on again."""

    def connect(self, first: WorkerGroup, second: WorkerGroup, name: str) -> None:
        """Joins two groups in one process group; see `hf_controller.connect`."""
        raise ProtocolError(
            f"{type(self).__name__} runs all ranks in one process and cannot connect {first.role} and {second.role}. "
            "Use RayExecutor"
        )

    @contextmanager
    def deadline(self, deadline: Deadline) -> Iterator[None]:
        """Gives calls made inside the block this deadline, in place of their methods' own.

        Raises:
            ConfigError: for another value than a Deadline, or another time than a finite number of seconds.
        """
        check_deadline("deadline", deadline)
        before, self._phase_deadline = self._phase_deadline, deadline
        try:
            yield
        finally:
            self._phase_deadline = before

    def failed_with(self, pool: ResourcePool) -> list[ResourcePool]:
        """`pool`, and those whose groups failed together with one of its groups: they are built again together."""
        self._check_open()
        return [pool]

    @abstractmethod
    def built_on(self, pool: ResourcePool) -> list[dict[str, WorkerSpec]]:
        """Returns the groups on `pool` as `build_groups` takes them: the roles of each set of processes."""

    def describe(self, group: WorkerGroup, timeout_s: float = 5.0) -> dict[int, str]:
        """Returns each rank's activity, process, machine and log, and the Python stack of its call.

        The request does not wait for calls. A rank that does not answer in time is described as such, with its last
        call. The in-process executor has nothing to describe.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Ends every worker and frees everything. May be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = error
        try:
            if kind is None and not self._closed:
                with Caught() as caught:
                    self._end_calls()
                failure = caught.error
        finally:
            close_after(failure, self.close)
        if failure is not None and failure is not error:
            raise failure

    def _end_calls(self) -> None:
        """Waits until the calls are over, and raises the first failure that was not reported."""
        self._finish_calls()
        untold = self.failure_log.find_untold()
        if untold is not None:
            error = untold.to_error()
            error.add_note(self.failure_log.describe_untold())
            raise error from untold.exception

    def _finish_calls(self) -> None:  # nothing is left to do where a call is over when made
        """Waits for the calls, and records in the failure log why they failed, or that they are late."""

    def put(self, batch: TensorDict) -> BatchFuture:
        """Stores a batch of this process, so that groups can read it.

        Raises:
            BatchError: for a batch that cannot travel.
            PoolError: if the executor is closed.
        """
        from hf_controller.data.results import encode_batch

        self._check_open()
        shard = encode_batch(batch, self._store)
        return self._batch_future(Source([shard], columns=tuple(shard.columns)))

    def _check_new(self, pool: ResourcePool, specs: Mapping[str, WorkerSpec]) -> None:
        taken = sorted({role for roles in self.built_on(pool) for role in roles} & set(specs))
        if taken:
            raise ProtocolError(
                f"pool {show(pool.name)} has a group {', '.join(taken)} already. Choose another name, or release the "
                "pool first"
            )


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Closes an executor after an error, if there was one, which stays the one that is raised: that of `close` becomes
    a note on it.
    """
    try:
        close()
    except HybridFlowError as failure:
        if error is None:
            raise
        error.add_note(f"the executor was not closed: {failure}")


def check_constructors(specs: Mapping[str, WorkerSpec]) -> None:
    """Refuses roles whose constructor needs more arguments than their specs have, before a process starts.

    Raises:
        ProtocolError: naming the role, the class and the first argument.
    """
    for role, spec in specs.items():
        try:
            inspect.signature(spec.worker).bind(None, **spec.kwargs)
        except TypeError as error:
            raise ProtocolError(
                f"{role}: the constructor of {spec.worker.__name__} is {error}. Add the argument to "
                "WorkerSpec(kwargs=...)"
            ) from None


def check_deadline(name: str, deadline: object) -> None:
    """Refuses what is not a deadline.

    Raises:
        ConfigError: saying what it is, or which key sets it.
    """
    _check_config.kind(name, deadline, Deadline, 'Deadline(seconds, "the name of what sets it")')
    assert isinstance(deadline, Deadline)
    _check_config.seconds(deadline.key, deadline.seconds)


def check_pool(pool: object) -> None:
    """Refuses what is not a pool.

    Raises:
        PoolError: saying what it is.
    """
    _check_pool.kind("pool", pool, ResourcePool, "the ResourcePool that the groups were built on")


def check_specs(pool: ResourcePool, specs: Mapping[str, WorkerSpec], *, fused: bool) -> None:
    """Refuses roles that do not fit the pool, or one another's process.

    Raises:
        PoolError: if a topology has another number of ranks than the pool has slots.
        ProtocolError: if there is no role, or fused roles of different training layouts have a worker that keeps its
            layout in globals.
    """
    _check_protocol.kind("pool", pool, ResourcePool, "a ResourcePool")
    wanted = "{role: WorkerSpec(...)}"
    _check_protocol.kind(f"build_groups on pool {show(pool.name)}: specs", specs, Mapping, wanted)
    if not specs:
        raise ProtocolError(f"build_groups on pool {show(pool.name)} got no role. Use {wanted}")
    for role, spec in specs.items():
        _check_protocol.kind("role", role, str, "its name")
        _check_protocol.kind(f"the spec of {role}", spec, WorkerSpec, "a WorkerSpec")
    for role, spec in specs.items():
        if spec.topology.world_size != pool.num_slots:
            sum_of = f"{' + '.join(map(str, pool.slots))} = " if len(pool.slots) > 1 else ""
            raise PoolError(
                f"{role} has {spec.topology.world_size} rank(s) (pp * tp * cp * dp), pool {show(pool.name)} has "
                f"{sum_of}{pool.num_slots} slot(s). Make them equal, or give the role a pool of its own"
            )
    layouts = {(spec.topology.train, spec.topology.order) for spec in specs.values()}
    if not fused or len(layouts) == 1:
        return
    rigid = [role for role, spec in specs.items() if spec.worker.one_layout_per_process(spec.kwargs)]
    if rigid:
        described = "; ".join(f"{role} is {_describe_layout(spec.topology)}" for role, spec in specs.items())
        raise ProtocolError(
            f"{', '.join(rigid)} cannot share processes with roles of another layout, because the library keeps its "
            f"layout in globals (pp-tp-dp: {described}). Give them one layout, or build them without fused=True"
        )


def _describe_layout(topology: Topology) -> str:
    """Returns pp-tp-dp, and every setting that is not the default."""
    train, generation = topology.train, topology.generation
    unusual = {
        "generation pp-tp": generation,
        "order": topology.order if topology.order != "megatron" else None,
        "grouping": topology.grouping if topology.grouping != "hybridflow" else None,
    }
    return " ".join([str(train), *(f"{name} {value}" for name, value in unusual.items() if value)])
