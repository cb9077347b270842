"""A worker group: all ranks of one role, called as one object; `connect` joins two of them.

A call becomes a message for each rank, with no more of its batches than it reads, and a future. If its method was
registered with `writes`, the columns that a call returns are known before it runs. Mistakes in columns are then found
at once, including those in columns that the call does not read. Otherwise the reader of the batch finds them.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_controller.data.algebra import Select
from hf_controller.data.columns import CallColumns, columns_of, find_columns
from hf_controller.data.expressions import Expression, Leaf, Source, choose_columns
from hf_controller.data.futures import (
    STAYS_HERE,
    BatchFuture,
    CallFuture,
    ListFuture,
    MetricsFuture,
    ObjectFuture,
    PendingCall,
    refuse_foreign,
)
from hf_controller.data.pruning import know_columns, prune
from hf_controller.failures import CLOSED, LostResultError
from hf_controller.groups.call import BatchArgument, Call, StoredArgument, check_rows
from hf_controller.groups.resource_pool import ResourcePool
from hf_controller.groups.worker import Worker, WorkerSpec
from hf_protocols import (
    ALL_TO_ALL,
    BatchError,
    HybridFlowError,
    MethodSpec,
    PerRank,
    PoolError,
    ProtocolError,
    Topology,
    TopologyError,
    TransferProtocol,
    registered_methods,
)
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_controller.data.transport import ObjectStore
    from hf_controller.failure_log import FailureLog
    from hf_controller.trace import Trace

__all__ = ["Dispatcher", "WorkerGroup", "build_calls", "compute_called_ranks", "connect"]


class WorkerGroup:
    """All ranks of one role. Its registered methods are called like those of a single object, and return at once.

    `group.method(*args, **kwargs)`: TensorDicts and BatchFutures among the arguments are distributed to the ranks by
    the method's protocol; everything else reaches every rank as it is. Arguments that the method does not take are a
    ProtocolError at once. The result is a `BatchFuture`, MetricsFuture, ListFuture or ObjectFuture, as the method is
    registered.

    Calls of one group, and of groups on one pool, run in the order in which they were made.
    """

    def __init__(
        self,
        role: str,
        spec: WorkerSpec,
        pool: ResourcePool,
        executor: Dispatcher,
    ) -> None:
        self.role = role
        self.spec = spec
        self.pool = pool
        self.methods: dict[str, MethodSpec] = registered_methods(spec.worker)
        self.executor = executor
        self.called_ranks: dict[str, tuple[int, ...]] = {}
        self._signatures: dict[str, inspect.Signature] = {}
        for owner, taken in (("WorkerGroup", {*vars(type(self)), *vars(self)}), ("Worker", {*vars(Worker), "context"})):
            if clashing := sorted(taken & self.methods.keys()):
                raise ProtocolError(
                    f"{spec.worker.__name__} registers {', '.join(clashing)}, which every {owner} has itself. Rename "
                    "the method"
                )

    @property
    def topology(self) -> Topology:
        """The role's layout."""
        return self.spec.topology

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.spec.topology.world_size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        methods = self.__dict__.get("methods", {})
        if name not in methods:
            known = ", ".join(sorted(methods)) or "none"
            raise AttributeError(
                f"group {self.__dict__.get('role')!r} has no method {show(name)}; it registers {known}"
            )
        return partial(self._call, name)

    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if method not in self._signatures:
            self._signatures[method] = inspect.signature(getattr(self.spec.worker, method))
        try:
            self._signatures[method].bind(None, *args, **kwargs)
        except TypeError as error:
            names = [name for name in self._signatures[method].parameters if name != "self"]
            raise ProtocolError(f"{self.role}.{method}({', '.join(names)}): {error}") from None
        return self.executor.submit(self, method, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        raise ProtocolError(
            f"group {show(self.role)} is called by the program that built it, and cannot be copied to a rank. Call it "
            "in the program, and pass its result"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.methods})

    def __repr__(self) -> str:
        return f"WorkerGroup({self.role!r}, {self.spec.worker.__name__}, {self.world_size} ranks on {self.pool.name!r})"


class Dispatcher(ABC):
    """Makes the calls of groups: numbers them, builds their messages and wraps their results.

    Attributes:
        trace: the spans of all calls.
        failure_log: their failures, and which of them the program knows.
        call_timeout_s: deadline of a call without a deadline of its own.
    """

    trace: Trace
    failure_log: FailureLog
    call_timeout_s: float
    _store: ObjectStore

    def __init__(self) -> None:
        self._call_ids = itertools.count(1)
        self._closed = False

    @abstractmethod
    def put(self, batch: TensorDict) -> BatchFuture:
        """Stores a batch of this process, so that groups can read it."""

    @abstractmethod
    def connect(self, first: WorkerGroup, second: WorkerGroup, name: str) -> None:
        """Joins two groups in one process group."""

    @abstractmethod
    def _launch(self, group: WorkerGroup, spec: MethodSpec, calls: Mapping[int, Call]) -> PendingCall:
        """Starts a call on the given ranks."""

    def submit(self, group: WorkerGroup, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call; groups do, for their methods."""
        self._check_open()
        spec = group.methods[method]
        call = Call(
            call_id=next(self._call_ids),
            role=group.role,
            method=method,
            args=args,
            kwargs=kwargs,
            after=(),
            submit_s=time.time(),
            timeout_s=self.call_timeout_s,
            labels=self.trace.labels,
            kind=spec.kind,
        )
        ranks = group.called_ranks.get(method)
        if ranks is None:
            try:
                ranks = group.called_ranks[method] = compute_called_ranks(spec.protocol, group.topology)
            except (ProtocolError, TopologyError) as error:
                raise type(error)(f"{group.role}.{method}: {error}") from error
        for value in (*args, *kwargs.values()):
            for item in value.items if isinstance(value, PerRank) else [value]:
                refuse_foreign(item, self._store, f"{group.role}.{method}")
        calls = build_calls(call, spec, ranks, self.put)
        check_rows(calls[ranks[0]], spec, group.topology, getattr(group.spec.worker, method))
        self.failure_log.note_place(call.call_id, _find_caller())
        columns = {rank: columns_of(made.columns, spec) for rank, made in calls.items()}
        return self._wrap(group, method, self._launch(group, spec, calls), columns)

    def _wrap(self, group: WorkerGroup, method: str, call: PendingCall, columns: Mapping[int, CallColumns]) -> Any:
        spec, maker = group.methods[method], f"{group.role}.{method}"
        if spec.returns == "metrics":
            return self._metrics_future(call, maker)
        collection = spec.protocol.collect(group.topology)
        writes = [columns[rank].writes for rank in collection.ranks]
        listed = collection.combine == "list"
        if not listed and (spec.returns == "batch" or len(call.handles) == 1):
            return self._wrap_one(spec, maker, call, writes[0])
        parts = [_CallPart(call, index) for index in range(len(call.handles))]
        items = [self._wrap_one(spec, maker, part, written) for part, written in zip(parts, writes, strict=True)]
        return ListFuture(call, self._store, maker, items)

    def _wrap_one(
        self, spec: MethodSpec, maker: str, call: PendingCall, writes: tuple[str, ...] | None
    ) -> BatchFuture | ObjectFuture:
        if spec.returns == "object":
            return ObjectFuture(call, self._store, maker)
        return self._batch_future(Source(call.handles, call, writes, maker))

    def _metrics_future(self, call: PendingCall, maker: str) -> MetricsFuture:
        return MetricsFuture(call, self._store, maker)

    def _check_open(self) -> None:
        if self._closed:
            raise PoolError(CLOSED)

    def _batch_future(self, source: Source) -> BatchFuture:
        return BatchFuture(Leaf(source), self._store, self.call_timeout_s)


def _find_caller() -> str:
    """File and line of the program that made a call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("hf_controller."):
        frame = frame.f_back
    return sys.intern(f"{frame.f_code.co_filename}:{frame.f_lineno}")  # one text per line of the program, not per call


class _CallPart:
    """One collected rank of a call, as a call of its own."""

    def __init__(self, call: PendingCall, index: int) -> None:
        self.handles = call.handles[index : index + 1]
        self._call = call
        self._index = index

    def wait(self, timeout_s: float | None) -> list[int]:
        return self._call.wait(timeout_s)[self._index : self._index + 1]

    def outcomes(self, timeout_s: float | None, position: int | None = None) -> list[Any]:
        return self._call.outcomes(timeout_s, self._index)

    def explain_loss(self, error: LostResultError) -> HybridFlowError | None:
        return self._call.explain_loss(error)


def compute_called_ranks(protocol: TransferProtocol, topology: Topology) -> tuple[int, ...]:
    """The ranks that take part in a call with any number of rows, which is often unknown when the call is made.

    Raises:
        TopologyError: for results that the topology does not have, such as those of generation replicas.
        ProtocolError: for a wrong collection of a user's own protocol.
    """
    collected = protocol.collect(topology).ranks  # an error comes before any rank runs
    return tuple(range(topology.world_size)) if protocol.called == "all" else collected


def build_calls(
    call: Call, spec: MethodSpec, ranks: Sequence[int], put: Callable[[Any], BatchFuture]
) -> dict[int, Call]:
    """Replaces futures and batches in `call`'s arguments, and gives every rank its call: one for all where they are
    equal.

    Args:
        call: the call as the user made it.
        spec: the method's registration.
        ranks: the ranks that take part.
        put: stores a TensorDict.

    Raises:
        ProtocolError: for a listed result, or PerRank, elsewhere than with ALL_TO_ALL, or the other way round; for
            metrics as an argument; for the wrong number of items; for an argument that declares columns wrongly.
        BatchError: for known columns that do not exist or collide.
    """
    what = f"{call.role}.{call.method}"
    args = tuple(_list_items(value, spec, what, ranks) for value in call.args)
    kwargs = {name: _list_items(value, spec, what, ranks) for name, value in call.kwargs.items()}
    if spec.protocol != ALL_TO_ALL:
        return dict.fromkeys(ranks, _build_call(call._replace(args=args, kwargs=kwargs), spec, what, put, whole=False))
    given = {
        rank: call._replace(
            args=tuple(_item_for(value, rank) for value in args),
            kwargs={name: _item_for(value, rank) for name, value in kwargs.items()},
        )
        for rank in ranks
    }
    return {rank: _build_call(each, spec, what, put, whole=True) for rank, each in given.items()}


def _item_for(value: Any, rank: int) -> Any:
    return value.items[rank] if isinstance(value, PerRank) else value


def _list_items(value: Any, spec: MethodSpec, what: str, ranks: Sequence[int]) -> Any:
    """Returns a listed result as its items, and any other argument as it is, where the protocol takes them."""
    if isinstance(value, ListFuture):
        value = PerRank(value.items)
    if not isinstance(value, PerRank):
        if spec.protocol == ALL_TO_ALL and (isinstance(value, BatchFuture) or _is_tensordict(value)):
            raise ProtocolError(f"{what} is registered with ALL_TO_ALL. Use PerRank([...]), one item for each rank")
        return value
    if spec.protocol != ALL_TO_ALL:
        raise ProtocolError(
            f"{what} distributes by {spec.protocol.name}: a listed result or PerRank feeds only ALL_TO_ALL"
        )
    if len(value.items) != len(ranks):
        raise ProtocolError(
            f"{what} has {len(ranks)} ranks and got PerRank of {len(value.items)} items. Pass one for each rank, "
            "or change the sizes of the group's topology"
        )
    return value


def _build_call(call: Call, spec: MethodSpec, what: str, put: Callable[[Any], BatchFuture], *, whole: bool) -> Call:
    """The call as one rank gets it: futures and batches replaced, and its columns known."""
    call = call._replace(columns=find_columns(spec, (*call.args, *call.kwargs.values()), what))
    columns = columns_of(call.columns, spec)
    return call._replace(
        args=tuple(_replace(value, columns, what, put, whole=whole) for value in call.args),
        kwargs={name: _replace(value, columns, what, put, whole=whole) for name, value in call.kwargs.items()},
    )


def _replace(value: Any, columns: CallColumns, what: str, put: Callable[[Any], BatchFuture], *, whole: bool) -> Any:
    if isinstance(value, MetricsFuture):
        raise ProtocolError("metrics are not an argument of a call. Pass their .result()")
    if isinstance(value, ObjectFuture):
        return StoredArgument(value.handle)
    if isinstance(value, BatchFuture):
        return BatchArgument(_narrow(value.expression, columns, what), whole)
    _refuse_nested(value)
    return BatchArgument(_narrow(put(value).expression, columns, what), whole) if _is_tensordict(value) else value


def _is_tensordict(value: Any) -> bool:
    # Recognised without importing tensordict, which takes seconds.
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(value, tensordict.TensorDictBase)


def _narrow(expression: Expression, columns: CallColumns, what: str) -> Expression:
    """Reduces a batch to the columns that the call reads, and refuses columns that are known to be missing."""
    if columns.reads is None and not columns.readers:
        return expression
    try:
        known = know_columns(expression)
        existing = known[id(expression)]
        if existing is not None:
            columns.check(existing, expression)
    except BatchError as error:
        raise BatchError(f"{what}: {error}") from error
    if columns.reads is None:
        return expression
    if existing is not None:
        choose_columns(columns.reads, existing, what)
    return Select(prune(expression, columns.reads, known), columns.reads)


def _refuse_nested(value: Any) -> None:
    """Refuses a future right inside a container: there it would not be distributed."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    for item in items:
        if isinstance(item, BatchFuture | CallFuture):
            raise ProtocolError(STAYS_HERE)


_check = Checks(ProtocolError)


def connect(first: WorkerGroup, second: WorkerGroup, *, name: str | None = None) -> str:
    """Joins the ranks of two disjoint groups in one process group, and waits until they met.

    Their workers find it in `self.context.connections[name]`. When one group ends, for example in `rebuild`, the other
    group leaves the connection. The name is then free again, as it is after an error. Joint ranks count `first`'s
    ranks, then `second`'s.

    Args:
        first: a group.
        second: a group of other processes, of the same executor.
        name: the connection's name; `"first-second"` after the roles by default.

    Returns:
        The name.

    Raises:
        ProtocolError: if the groups share processes or run in different executors, or the name is taken.
        HybridFlowError: what went wrong on a rank.
        WorkerTimeoutError: if the ranks do not meet in time.
    """
    for side, group in (("first", first), ("second", second)):
        _check.kind(f"connect: {side}", group, WorkerGroup, "a WorkerGroup")
    _check.kind("connect: name", name, str | None, "a string")
    if first.executor is not second.executor:
        raise ProtocolError(f"{first.role} and {second.role} belong to different executors. Build both with one")
    name = name or f"{first.role}-{second.role}"
    first.executor.connect(first, second, name)
    return name
