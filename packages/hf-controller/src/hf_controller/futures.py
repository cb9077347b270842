"""Results of calls that may not have happened yet, and the algebra of batches on them.

Nothing here moves a tensor before :meth:`BatchFuture.result`: a future is a tree over earlier calls
(:mod:`hf_controller.expressions`), and a call that gets it as an argument sends the tree on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hf_controller import expressions
from hf_controller.expressions import Expression, Extent, Source
from hf_controller.failures import UpstreamFailure
from hf_protocols import BatchError, ProtocolError, RowSelection

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_controller.results import Outcome
    from hf_controller.transport import ObjectStore

__all__ = [
    "STAYS_HERE",
    "BatchFuture",
    "CallFuture",
    "ListFuture",
    "MetricsFuture",
    "ObjectFuture",
    "PendingCall",
    "as_selection",
    "refuse_foreign",
]


class PendingCall(Protocol):
    """A call that was made: what an executor gives a future."""

    @property
    def handles(self) -> Sequence[Any]:
        """One handle for each collected rank's outcome, in collected order."""
        ...

    def wait(self, timeout_s: float | None) -> list[int]:
        """Wait until every rank is done; the answer is the number of rows that each collected rank returned.

        Raises:
            HybridFlowError: of the class of the first rank that failed.
            WorkerTimeoutError: if a rank is not done in time.
        """
        ...

    def outcomes(self, timeout_s: float | None) -> list[Outcome]:
        """After waiting, what the collected ranks left, in collected order."""
        ...


class BatchFuture:
    """A batch that calls will have made: rows by columns, spread over ranks.

    Given to another group's method, its rows move from the ranks that hold them to the ranks that need them. Every
    method here answers at once with another future; mistakes in rows or columns are raised where the batch is first
    used, by the call or by :meth:`result`.
    """

    def __init__(self, expression: Expression, store: ObjectStore, timeout_s: float) -> None:
        self._expression = expression
        self._store = store
        self._timeout_s = timeout_s

    def __reduce__(self) -> tuple[Any, ...]:
        raise ProtocolError(STAYS_HERE)

    @property
    def store(self) -> ObjectStore:
        """The store of the executor that made this future."""
        return self._store

    @property
    def expression(self) -> Expression:
        """The tree behind this future."""
        return self._expression

    def rows(self, index: Iterable[int] | slice | RowSelection) -> BatchFuture:
        """The chosen rows, in the chosen order; a row may be chosen more than once.

        Args:
            index: row numbers (list, range, tensor, array), or a slice with a stop.
        """
        return self._with(expressions.Rows(self._expression, as_selection(index)))

    def split(self, count: int) -> tuple[BatchFuture, ...]:
        """``count`` consecutive parts whose sizes differ by at most one, larger first."""
        _check_positive("split", count)
        return tuple(self._with(expressions.Chunk(self._expression, index, count)) for index in range(count))

    def repeat(self, times: int) -> BatchFuture:
        """Every row ``times`` times in a row: row r becomes rows r*times ... r*times+times-1."""
        _check_positive("repeat", times)
        return self._with(expressions.Repeat(self._expression, times))

    def concat(self, other: BatchFuture) -> BatchFuture:
        """The rows of ``other`` after these; both must have the same columns."""
        return self._with(expressions.Concat(self._expression, self._expression_of(other, "concat")))

    def select(self, columns: Sequence[str]) -> BatchFuture:
        """Only these columns; a name that ends in ``?`` is taken if it is there."""
        if isinstance(columns, str):
            raise BatchError(f"select({columns!r}): give a list of column names, such as [{columns!r}]")
        return self._with(expressions.Select(self._expression, tuple(columns)))

    def rename(self, names: Mapping[str, str]) -> BatchFuture:
        """Other names for some columns: ``{old: new}``."""
        if not isinstance(names, Mapping):
            raise BatchError(f"rename({names!r}): give a mapping of old to new column names")
        return self._with(expressions.Rename(self._expression, tuple(names.items())))

    def union(self, other: BatchFuture) -> BatchFuture:
        """The columns of both, row by row; of a column on both sides that of ``other`` stays.

        Both must have equally many rows.
        """
        return self._with(expressions.Union(self._expression, self._expression_of(other, "union")))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the rows exist, without moving them; the deadline is the executor's ``call_timeout_s`` by default.

        Raises:
            HybridFlowError: what a rank raised, of its own class where it is one of ours.
            WorkerTimeoutError: if the deadline passes.
        """
        self._count_rows(timeout_s)

    @property
    def num_rows(self) -> int:
        """Number of rows. Waits until the calls behind it are done; moves no tensor."""
        return self._expression.num_rows(self._count_rows(None))

    def result(self, timeout_s: float | None = None) -> TensorDict:
        """Fetch the batch to this process. The tensors may be views of shared memory: clone before writing in place.

        Raises:
            BatchError: for rows or columns that do not exist.
            HybridFlowError: what a rank raised, of its own class where it is one of ours.
            WorkerTimeoutError: if the deadline passes.
        """
        from hf_controller.gather import BatchReader

        self.wait(timeout_s)
        reader = BatchReader(self._store, self._timeout_s if timeout_s is None else timeout_s)
        try:
            reader.look_up([self._expression])
        except UpstreamFailure as error:
            raise error.failure.to_error() from None
        rows = RowSelection.range(0, self._expression.num_rows(reader.extents))
        return reader.read(self._expression, rows, self._expression.columns(reader.extents))

    def _count_rows(self, timeout_s: float | None) -> dict[Source, Extent]:
        """Wait for every source; the columns of the answer are left out."""
        deadline_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        extents = {}
        for source in self._expression.sources():
            if source.call is None:
                counts = [shard.num_rows for shard in source.shards]
            else:
                counts = source.call.wait(max(0.0, deadline_s - time.monotonic()))
            extents[source] = Extent(sum(counts), ())
        return extents

    def _expression_of(self, other: object, what: str) -> Expression:
        if not isinstance(other, BatchFuture):
            raise BatchError(
                f"{what} joins futures, got a {type(other).__name__}: put a TensorDict first, with executor.put(batch)"
            )
        refuse_foreign(other, self._store, what)
        return other.expression

    def _with(self, expression: Expression) -> BatchFuture:
        return BatchFuture(expression, self._store, self._timeout_s)


class CallFuture:
    """What the futures of one call's small results share."""

    def __init__(self, call: PendingCall, store: ObjectStore) -> None:
        self._call = call
        self.store = store

    def __reduce__(self) -> tuple[Any, ...]:
        raise ProtocolError(STAYS_HERE)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every rank is done; raises what :meth:`BatchFuture.wait` raises."""
        self._call.wait(timeout_s)


class MetricsFuture(CallFuture):
    """Metrics of a call: (sum, count) pairs, added over the collected ranks."""

    def result(self, timeout_s: float | None = None) -> dict[str, float]:
        """Each metric's sum over its count; nan where the count is zero. Raises what :meth:`wait` raises."""
        from hf_controller.results import Metrics, reduce_metrics

        return reduce_metrics([each for each in self._call.outcomes(timeout_s) if isinstance(each, Metrics)])


class ObjectFuture(CallFuture):
    """The object that one rank returns. Given to another group's method, the ranks there get the object."""

    def result(self, timeout_s: float | None = None) -> Any:
        """The object. Raises what :meth:`wait` raises."""
        from hf_controller.results import Value

        (outcome,) = self._call.outcomes(timeout_s)
        assert isinstance(outcome, Value)
        return outcome.value

    @property
    def handle(self) -> Any:
        """Where the object will lie."""
        return self._call.handles[0]


class ListFuture(CallFuture):
    """One result for each collected rank; it feeds only ``ALL_TO_ALL``, item i to rank i.

    Args:
        call: the call.
        store: the store of the call's executor.
        items: each rank's result as a future of its own; None where results are objects.
    """

    def __init__(self, call: PendingCall, store: ObjectStore, items: Sequence[BatchFuture] | None) -> None:
        super().__init__(call, store)
        self._items = items

    def __len__(self) -> int:
        return len(self._call.handles)

    @property
    def items(self) -> list[BatchFuture]:
        """Each rank's batch as a future of its own.

        Raises:
            ProtocolError: if the ranks return objects.
        """
        if self._items is None:
            raise ProtocolError("the ranks of this call return objects, not batches: take .result(), a list of them")
        return list(self._items)

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Every collected rank's batch or object, in rank order. Raises what :meth:`wait` raises."""
        from hf_controller.results import Value

        if self._items is not None:
            self.wait(timeout_s)
            return [item.result(timeout_s) for item in self._items]
        return [each.value for each in self._call.outcomes(timeout_s) if isinstance(each, Value)]


def as_selection(index: Iterable[int] | slice | RowSelection) -> RowSelection:
    """Row numbers as a RowSelection.

    Raises:
        BatchError: for a slice without an end to count from, a negative number, or what is no row number (a mask, say).
    """
    if isinstance(index, RowSelection):
        return index
    if isinstance(index, slice):
        backwards = (index.step or 1) < 0
        end = index.start if backwards else index.stop
        if end is None or min(end, index.start or 0, index.stop or 0) < 0 or index.step == 0:
            raise BatchError(
                f"rows({index}): a batch that is not there yet needs a slice with a stop >= 0 (backwards: a start), "
                "no negatives but the step, and no step of 0"
            )
        index = range(*index.indices(end + backwards))
    if isinstance(index, range) and index.step == 1 and index.start >= 0:
        return RowSelection.range(index.start, max(index.start, index.stop))
    rows = index.tolist() if hasattr(index, "tolist") else list(index)
    wrong = next((row for row in rows if isinstance(row, bool) or not hasattr(row, "__index__") or row < 0), None)
    if wrong is not None:
        raise BatchError(f"rows(...) got {wrong!r}: give row numbers >= 0 (of a mask, those of its true entries)")
    return RowSelection.from_rows(map(int, rows))


def refuse_foreign(value: object, store: ObjectStore, what: str) -> None:
    """Refuse a future whose results lie in another executor's store.

    Raises:
        ProtocolError: naming ``what`` the future was given to, and both stores.
    """
    if isinstance(value, BatchFuture | CallFuture) and value.store is not store:
        raise ProtocolError(
            f"{what} belongs to one executor (its store is a {type(store).__name__}) and got a {type(value).__name__} "
            f"of another (a {type(value.store).__name__}): build both with one executor, or give its .result()"
        )


def _check_positive(what: str, number: object) -> None:
    if not isinstance(number, int) or number < 1:
        raise BatchError(f"{what}({number!r}): give a whole number of at least 1")


STAYS_HERE = (
    "a future travels only as an argument of a group's method, by itself: take it out of the list, dict or object it "
    "is in, or give the method its .result()"
)
