"""Calls that are written down instead of made: worker groups without workers, to see what a program would call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

from hf_controller.data.columns import columns_of
from hf_controller.data.expressions import Expression, Extent, Leaf, Segment, Source, choose_columns
from hf_controller.data.futures import BatchFuture, MetricsFuture, PendingCall
from hf_controller.executors.base import Executor, check_pool, check_specs
from hf_controller.failure_log import FailureLog
from hf_controller.groups.call import BatchArgument, Call, StoredArgument
from hf_controller.groups.resource_pool import ResourcePool
from hf_controller.groups.worker import Worker, WorkerSpec
from hf_controller.groups.worker_group import WorkerGroup
from hf_controller.trace import Trace
from hf_protocols import (
    BatchError,
    ConfigError,
    GenerationSpec,
    MethodSpec,
    ParallelSpec,
    PoolError,
    RowSelection,
    Topology,
)
from hf_protocols.validation import Checks

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_controller.data.transport import ObjectStore

__all__ = ["TracedCall", "TracedResult", "TracingExecutor"]

_check_batch = Checks(BatchError)
_check_config = Checks(ConfigError)


@dataclass(frozen=True, eq=False)
class TracedResult:
    """Stands for what a call returns, or for a batch that was put: its rows and columns without values.

    Attributes:
        call: the call that returns it; None for a batch that was put.
        num_rows: number of rows.
        columns: names of the columns; none of metrics and objects.
    """

    call: TracedCall | None
    num_rows: int
    columns: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedCall:
    """A call that was written down.

    Attributes:
        role: role of the group that was called.
        method: name of the method.
        spec: the method's registration.
        reads: where the rows of each column that the call reads come from, by the column's name. Each segment's source
            has one shard, a `TracedResult`. Columns of a second batch argument have `.1` after the name.
        writes: columns that the call returns; none of metrics and objects.
        objects: the calls whose objects are arguments of this one.
        arguments: the other arguments as they were given, those by name last; without batches.
        num_rows: number of rows of the first batch that has some.
    """

    role: str
    method: str
    spec: MethodSpec
    reads: Mapping[str, Sequence[Segment]]
    writes: tuple[str, ...]
    objects: Sequence[TracedCall]
    arguments: Sequence[object]
    num_rows: int


class TracingExecutor(Executor):
    """Writes down every call of its groups and makes none. No worker, no process and no cluster is started.

    A program runs on it as on any executor, up to the point where it needs values. Mistakes in roles, methods, columns
    and arguments raise the same errors. `.result()` of metrics has 0.0 for any name, so that a program which
    branches on a metric runs through. `.result()` of a batch or an object raises ConfigError.

    Rows follow from a method's registration. `"times"` multiplies them by the `n` of an argument that has one
    (`SamplingParams.n`); `"unknown"` is taken for `"same"`. Of a method of `ALL_TO_ALL` the items of the first
    rank are written down.

    Args:
        max_calls: number of calls after which the program is taken for one that does not end.

    Attributes:
        calls: the calls in the order in which they were made.
        results: what would be stored, in the same order: a result for each batch that was put, and for each rank whose
            result is collected.

    Raises:
        ConfigError: for a `max_calls` that is not a whole number of at least 1.
    """

    def __init__(self, *, max_calls: int = 100_000) -> None:
        super().__init__()
        _check_config.count("max_calls", max_calls)
        self.calls: list[TracedCall] = []
        self.results: list[TracedResult] = []
        self.failure_log = FailureLog()
        self.trace = Trace(self.failure_log.take_spans)
        self.call_timeout_s = 0.0
        # Nothing is stored: the object only distinguishes the futures of one executor from those of another.
        self._store = cast("ObjectStore", _NothingStored())
        self._max_calls = max_calls
        self._built: dict[ResourcePool, list[dict[str, WorkerSpec]]] = {}

    def build_group(self, role: str, worker: type[Worker]) -> WorkerGroup:
        """Returns a group of `worker` with one rank, on a pool of its own."""
        spec = WorkerSpec(worker=worker, topology=Topology(ParallelSpec(), GenerationSpec()))
        return self.build_groups(ResourcePool([1], device="cpu", name=role), {role: spec})[role]

    def put_columns(self, columns: Sequence[str], num_rows: int) -> BatchFuture:
        """Returns a batch of which only column names and the number of rows are known.

        Raises:
            BatchError: for columns that are not a list of names, or a negative number of rows.
            PoolError: if the executor is closed.
        """
        self._check_open()
        _check_batch.count("num_rows", num_rows, least=0)
        names = _check_batch.columns("columns", columns, may_lack=False)
        result = TracedResult(None, num_rows, names)
        self.results.append(result)
        # As if a call had made it: too few rows for the ranks are written down, not refused.
        return self._batch_future(Source([result], _TracedAnswer([result], "a batch"), names))

    def put(self, batch: TensorDict) -> BatchFuture:
        """Returns a batch with the columns and the number of rows of `batch`; its values are not kept."""
        return self.put_columns(tuple(map(str, batch.keys())), len(batch))

    def build_groups(
        self, pool: ResourcePool, specs: Mapping[str, WorkerSpec], *, fused: bool = False, wait: bool = True
    ) -> dict[str, WorkerGroup]:
        """Returns one group per role, without workers; see `Executor.build_groups`."""
        self._check_open()
        check_specs(pool, specs, fused=fused)
        self._check_new(pool, specs)
        groups = {role: WorkerGroup(role, spec, pool, self) for role, spec in specs.items()}
        self._built.setdefault(pool, []).extend([dict(specs)] if fused else [{role: specs[role]} for role in specs])
        return groups

    def wait_until_ready(self) -> None:
        """Returns at once: nothing is built."""

    def release(self, pool: ResourcePool) -> None:
        """Forgets the groups on `pool`, so that others can be built on it."""
        check_pool(pool)
        self._built.pop(pool, None)

    def built_on(self, pool: ResourcePool) -> list[dict[str, WorkerSpec]]:
        """Returns the roles on `pool`; see `Executor.built_on`."""
        return list(self._built.get(pool, ()))

    def close(self) -> None:
        """Refuses further calls; `calls` stays."""
        self._closed = True
        self._built.clear()

    def _launch(self, group: WorkerGroup, spec: MethodSpec, calls: Mapping[int, Call]) -> PendingCall:
        call = next(iter(calls.values()))
        what = f"{call.role}.{call.method}"
        if group.role not in {role for roles in self.built_on(group.pool) for role in roles}:
            raise PoolError(f"group {group.role!r} is closed: its pool {group.pool.name!r} was released")
        if len(self.calls) >= self._max_calls:
            raise ConfigError(
                f"{what}: the program made max_calls={self._max_calls} calls before it and goes on. While calls are "
                "traced every metric is 0.0: bound loops that wait for a metric to change"
            )
        columns = columns_of(call.columns, spec)
        if spec.returns == "batch" and columns.writes is None:
            raise ConfigError(f"{what} does not say which columns it returns. Register it with writes=[...]")
        values = (*call.args, *call.kwargs.values())
        batches = [value.expression for value in values if isinstance(value, BatchArgument)]
        reads, num_rows = _locate(what, columns.reads, batches)
        made = TracedCall(
            role=call.role,
            method=call.method,
            spec=spec,
            reads=reads,
            writes=(columns.writes or ()) if spec.returns == "batch" else (),
            objects=[value.handle.call for value in values if isinstance(value, StoredArgument)],
            arguments=[value for value in values if not isinstance(value, BatchArgument | StoredArgument)],
            num_rows=num_rows,
        )
        self.calls.append(made)
        times = next((value.n for value in values if type(getattr(value, "n", None)) is int), 1)
        result = TracedResult(made, num_rows * times if spec.rows == "times" else num_rows, made.writes)
        collection = spec.protocol.collect(group.topology)
        is_whole = spec.returns == "batch" and collection.combine == "concat"
        results = [result] * (1 if is_whole else len(collection.ranks))
        self.results += results
        return _TracedAnswer(results, what)

    def _batch_future(self, source: Source) -> BatchFuture:
        return _TracedBatch(Leaf(source), self._store, self.call_timeout_s)

    def _metrics_future(self, call: PendingCall, maker: str) -> MetricsFuture:
        return _TracedMetrics(call, self._store, maker)


class _NothingStored:
    """A store in which nothing lies."""


class _TracedBatch(BatchFuture):
    """A batch without values."""

    def result(self, timeout_s: float | None = None) -> NoReturn:
        _refuse(f"a batch of {self._expression.describe_makers()}")

    def _with(self, expression: Expression) -> BatchFuture:
        return _TracedBatch(expression, self._store, self._timeout_s)


class _TracedMetrics(MetricsFuture):
    """Metrics without values."""

    def result(self, timeout_s: float | None = None) -> dict[str, float]:
        self.wait(timeout_s)
        return _Zeros()

    def sums(self, timeout_s: float | None = None) -> dict[str, tuple[float, float]]:
        self.wait(timeout_s)
        return _ZeroSums()


class _Zeros(dict[str, Any]):
    """Returns 0.0 for any name. The names are not known, so iteration is empty."""

    def __missing__(self, name: str) -> Any:
        return 0.0

    def __contains__(self, name: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return True

    def __or__(self, other: Mapping[str, Any]) -> _Zeros:  # type: ignore[override]
        return type(self)({**self, **other})

    def __ror__(self, other: Mapping[str, Any]) -> _Zeros:  # type: ignore[override]
        return type(self)({**other, **self})

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]

    def copy(self) -> _Zeros:
        return type(self)(self)


class _ZeroSums(_Zeros):
    """The same as (sum, count)."""

    def __missing__(self, name: str) -> Any:
        return 0.0, 1.0


class _TracedAnswer:
    """A call that was written down, as futures see it: its rows are known, its values are not."""

    def __init__(self, results: Sequence[TracedResult], what: str) -> None:
        self.handles = tuple(results)
        self._what = what

    def wait(self, timeout_s: float | None) -> list[int]:
        return [result.num_rows for result in self.handles]

    def outcomes(self, timeout_s: float | None, position: int | None = None) -> NoReturn:
        _refuse(self._what)

    def explain_loss(self, error: Exception) -> None:
        """Nothing is there that could be lost."""


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"the result of {what} is not available: calls are traced, not made, and only rows and column names are known. "
        "Decide by metrics, which are 0.0 while tracing, or inside a worker's method"
    )


def _locate(
    what: str, reads: Sequence[str] | None, expressions: Sequence[Expression]
) -> tuple[dict[str, Sequence[Segment]], int]:
    """Returns the origin of each column that a method reads, and the number of rows of its first batch."""
    found: dict[str, Sequence[Segment]] = {}
    num_rows = 0
    for number, expression in enumerate(expressions):
        extents = {
            source: Extent(source.shards[0].num_rows, source.shards[0].columns) for source in expression.sources()
        }
        try:
            count, columns = expression.num_rows(extents), expression.columns(extents)
            wanted = columns if reads is None else choose_columns(reads, columns, "the call")
            located = expression.locate(RowSelection.range(0, count), wanted, extents)
        except BatchError as error:
            raise BatchError(f"{what}: {error}") from error
        found.update(located if number == 0 else {f"{name}.{number}": rows for name, rows in located.items()})
        num_rows = num_rows or count
    return found, num_rows
