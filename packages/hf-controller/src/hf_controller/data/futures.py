"""Results of calls that may not have happened yet, and the algebra of batches on them.

Nothing here moves a tensor before `BatchFuture.result`: a future is a tree over earlier calls
(`hf_controller.data.expressions`), and a call that gets it as an argument sends the tree on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hf_controller.data.algebra import Chunk, Concat, Rename, Repeat, Rows, Select, Union
from hf_controller.data.expressions import Expression, Extent, Source
from hf_controller.failures import LostResultError, UpstreamFailure
from hf_protocols import BatchError, ConfigError, HybridFlowError, ProtocolError, RowSelection, merge_metrics
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_controller.data.results import Outcome
    from hf_controller.data.transport import ObjectStore

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

_check_batch = Checks(BatchError)
_check_config = Checks(ConfigError)

_MAX_PARTS = 2**20


class PendingCall(Protocol):
    """A call that was made: what an executor gives a future."""

    @property
    def handles(self) -> Sequence[Any]:
        """One handle for each collected rank's outcome, in collected order."""
        ...

    def wait(self, timeout_s: float | None) -> list[int]:
        """Waits until every rank is done; returns the number of rows from each collected rank.

        Raises:
            HybridFlowError: of the class of the first rank that failed.
            WorkerTimeoutError: if a rank is not done in time.
        """
        ...

    def outcomes(self, timeout_s: float | None, position: int | None = None) -> list[Outcome]:
        """Waits; returns the collected ranks' outcomes in collected order, or with `position` only that one."""
        ...

    def explain_loss(self, error: LostResultError) -> HybridFlowError | None:
        """Returns the reason why the call's result is lost; None if the loss is not its own, or has no known reason."""
        ...


class BatchFuture:
    """A batch that calls will have made: rows by columns, spread over ranks.

    Given to another group's method, its rows move from the ranks that hold them to the ranks that need them. Every
    method here returns another future at once. Mistakes in rows or columns are raised where the batch is first used,
    by the call or by `result`.
    """

    def __init__(self, expression: Expression, store: ObjectStore, timeout_s: float) -> None:
        self._expression = expression
        self._store = store
        self._timeout_s = timeout_s

    def __reduce__(self) -> tuple[Any, ...]:
        raise ProtocolError(STAYS_HERE)

    def __repr__(self) -> str:
        return f"BatchFuture(of {self._expression.describe_makers()})"

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
        return self._with(Rows(self._expression, as_selection(index)))

    def split(self, count: int) -> tuple[BatchFuture, ...]:
        """Returns `count` consecutive parts whose sizes differ by at most one, larger first; 2**20 parts at most."""
        _check_batch.count("split: count", count)
        if count > _MAX_PARTS:
            raise BatchError(f"split: count={show(count)} is more than {_MAX_PARTS} parts, each a future. Use fewer")
        return tuple(self._with(Chunk(self._expression, index, count)) for index in range(count))

    def repeat(self, times: int) -> BatchFuture:
        """Repeats each row `times` times: row r becomes rows r*times ... r*times+times-1."""
        _check_batch.count("repeat: times", times)
        return self._with(Repeat(self._expression, times))

    def concat(self, *others: BatchFuture) -> BatchFuture:
        """Appends the rows of `others` in order; all must have the same columns.

        Many batches are joined fastest by one call: `first.concat(*rest)`.
        """
        return self._with(Concat.over([self._expression, *(self._expression_of(each, "concat") for each in others)]))

    def select(self, columns: Sequence[str]) -> BatchFuture:
        """Returns these columns only; a name that ends in `?` is taken if the batch has it."""
        return self._with(Select(self._expression, _check_batch.columns("select", columns, may_lack=True)))

    def rename(self, names: Mapping[str, str]) -> BatchFuture:
        """Renames some columns: `{old: new}`."""
        if not isinstance(names, Mapping):
            raise BatchError(f"rename({show(names)}). Use a mapping of old to new column names")
        _check_batch.columns("the names in rename", [*names, *names.values()], may_lack=False)
        return self._with(Rename(self._expression, tuple(names.items())))

    def union(self, other: BatchFuture) -> BatchFuture:
        """Joins the columns of both batches, row by row; of a column that both have, that of `other` is kept.

        Both must have equally many rows.
        """
        return self._with(Union(self._expression, self._expression_of(other, "union")))

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the rows exist, without moving them.

        Args:
            timeout_s: how long to wait; by default until the calls' own deadlines. A group that misses its deadline is
                ended.

        Raises:
            HybridFlowError: what a rank raised, of its own class where it is one of ours.
            WorkerTimeoutError: if the time passes.
        """
        self._count_rows(self._expression, timeout_s)

    @property
    def num_rows(self) -> int:
        """Number of rows. Waits for the calls that the batch follows from; moves no tensor.

        For a union, only the calls behind its left side are waited for: the right side must have as many rows, or the
        union fails where it is read.
        """
        leading = self._expression.leading()
        return leading.num_rows(self._count_rows(leading, None))

    def result(self, timeout_s: float | None = None) -> TensorDict:
        """Fetches the batch to this process. The tensors may be views of memory that all readers of the batch share:
        clone before writing in place, because such a write goes unnoticed here.

        Raises:
            BatchError: for rows or columns that do not exist.
            HybridFlowError: what a rank raised, of its own class where it is one of ours.
            WorkerTimeoutError: if the deadline passes.
        """
        ends_s = self._deadline_s(timeout_s)
        self.wait(timeout_s)
        try:
            return self._read(self._timeout_s if ends_s is None else _left_until(ends_s))
        except UpstreamFailure as error:
            raise error.failure.to_error() from None
        except LostResultError as error:
            raise self._explain(error) from None

    def _read(self, timeout_s: float) -> TensorDict:
        from hf_controller.data.gather import BatchReader

        reader = BatchReader(self._store, timeout_s)
        reader.look_up([self._expression])
        rows = RowSelection.range(0, self._expression.num_rows(reader.extents))
        return reader.read(self._expression, rows, self._expression.columns(reader.extents))

    def _explain(self, error: LostResultError) -> HybridFlowError:
        calls = [source.call for source in self._expression.sources() if source.call is not None]
        explained = next((death for call in calls if (death := call.explain_loss(error)) is not None), None)
        return explained or LostResultError(f"{error}; the batch comes from {self._expression.describe_makers()}")

    def _count_rows(self, expression: Expression, timeout_s: float | None) -> dict[Source, Extent]:
        """Waits for every source of `expression`; returns their numbers of rows, without columns."""
        ends_s = self._deadline_s(timeout_s)
        extents = {}
        for source in expression.sources():
            if source.call is None:
                counts = [shard.num_rows for shard in source.shards]
            else:
                counts = source.call.wait(None if ends_s is None else _left_until(ends_s))
            extents[source] = Extent(sum(counts), ())
        return extents

    def _deadline_s(self, timeout_s: float | None) -> float | None:
        _check_deadline(timeout_s)
        return None if timeout_s is None else time.monotonic() + timeout_s

    def _expression_of(self, other: object, what: str) -> Expression:
        if not isinstance(other, BatchFuture):
            raise BatchError(
                f"{what} joins futures, got a {type(other).__name__}. Put a TensorDict first, with executor.put(batch)"
            )
        if other.store is not self._store:  # to describe a batch is to walk its tree, which a loop may have built
            refuse_foreign(other, self._store, f"{what} with a batch of {self._expression.describe_makers()}")
        return other.expression

    def _with(self, expression: Expression) -> BatchFuture:
        return BatchFuture(expression, self._store, self._timeout_s)


class CallFuture:
    """Common base of the futures of one call's small results.

    Args:
        call: the call.
        store: the store of the call's executor.
        maker: the call, for messages, such as `"actor.update_actor"`.
    """

    def __init__(self, call: PendingCall, store: ObjectStore, maker: str) -> None:
        self._call = call
        self.store = store
        self.maker = maker

    def __reduce__(self) -> tuple[Any, ...]:
        raise ProtocolError(STAYS_HERE)

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until every rank is done. Raises the errors of `BatchFuture.wait`."""
        _check_deadline(timeout_s)
        self._call.wait(timeout_s)

    def _wait_for_outcomes(self, timeout_s: float | None) -> list[Outcome]:
        _check_deadline(timeout_s)
        return self._call.outcomes(timeout_s)


class MetricsFuture(CallFuture):
    """Metrics of a call: (sum, count) pairs, merged over the collected ranks."""

    def result(self, timeout_s: float | None = None) -> dict[str, float]:
        """Returns each metric's sum over its count; nan where the count is zero. Raises the errors of `wait`."""
        return {name: value / count if count else float("nan") for name, (value, count) in self.sums(timeout_s).items()}

    def sums(self, timeout_s: float | None = None) -> dict[str, tuple[float, float]]:
        """Each metric's (sum, count), to be merged with those of other calls by `hf_protocols.merge_metrics`.

        A mean over several calls is the sum of their sums over the sum of their counts: a call with a larger count
        weighs more. Raises the errors of `wait`.
        """
        from hf_controller.data.results import Metrics

        return merge_metrics(each.sums for each in self._wait_for_outcomes(timeout_s) if isinstance(each, Metrics))


class ObjectFuture(CallFuture):
    """The object that one rank returns. Given to another group's method, the ranks there get the object."""

    def result(self, timeout_s: float | None = None) -> Any:
        """Returns the object. Raises the errors of `wait`."""
        from hf_controller.data.results import Value

        (outcome,) = self._wait_for_outcomes(timeout_s)
        assert isinstance(outcome, Value)
        return outcome.value

    @property
    def handle(self) -> Any:
        """Handle of the object."""
        return self._call.handles[0]


class ListFuture(CallFuture):
    """One result for each collected rank; it feeds only `ALL_TO_ALL`, item i to rank i.

    Args:
        call: the call.
        store: the store of the call's executor.
        maker: the call, for messages.
        items: each rank's result as a future of its own.
    """

    def __init__(
        self, call: PendingCall, store: ObjectStore, maker: str, items: Sequence[BatchFuture | ObjectFuture]
    ) -> None:
        super().__init__(call, store, maker)
        self._items = tuple(items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> list[BatchFuture | ObjectFuture]:
        """Each rank's batch or object as a future of its own."""
        return list(self._items)

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Returns every collected rank's batch or object, in rank order. Raises the errors of `wait`."""
        from hf_controller.data.results import Value

        if isinstance(self._items[0], ObjectFuture):
            return [each.value for each in self._wait_for_outcomes(timeout_s) if isinstance(each, Value)]
        self.wait(timeout_s)
        return [item.result(timeout_s) for item in self._items]  # each is there: the time is for fetching


def as_selection(index: Iterable[int] | slice | RowSelection) -> RowSelection:
    """Row numbers as a RowSelection.

    Raises:
        BatchError: for a slice without an end to count from, a negative number, or other things than row numbers.
    """
    if isinstance(index, RowSelection):
        return index
    if isinstance(index, slice):
        index = _range_of(index)
    if isinstance(index, range) and index.step == 1 and index.start >= 0:
        return RowSelection.range(index.start, max(index.start, index.stop))
    rows = index.tolist() if hasattr(index, "tolist") else index
    if not isinstance(rows, Iterable):
        raise BatchError(
            f"rows({show(index)}). Use row numbers as a list, range, slice, tensor or array; of one row, "
            f"rows([{show(rows)}])"
        )
    rows = list(rows)
    wrong = next((row for row in rows if _is_flag(row) or not hasattr(row, "__index__") or row < 0), None)
    if wrong is not None:
        raise BatchError(f"rows(...) got {show(wrong)}. Use row numbers >= 0 (of a mask, those of its true entries)")
    return RowSelection.from_rows(map(int, rows))


def _is_flag(row: Any) -> bool:
    """Returns True for an entry of a mask."""
    return isinstance(row, bool) or str(getattr(row, "dtype", "")).endswith("bool")


def _range_of(index: slice) -> range:
    are_whole = all(part is None or hasattr(part, "__index__") for part in (index.start, index.stop, index.step))
    backwards = are_whole and (index.step or 1) < 0
    end = index.start if backwards else index.stop
    if not are_whole or end is None or min(end, index.start or 0, index.stop or 0) < 0 or index.step == 0:
        raise BatchError(
            f"rows({index}): the size of a batch that does not exist yet is not known. Use whole numbers of at least "
            "0 and give the end, such as rows(slice(0, 4)), or the start of a slice that goes backwards"
        )
    return range(*index.indices(end + backwards))


def refuse_foreign(value: object, store: ObjectStore, what: str) -> None:
    """Refuses a future whose results lie in another executor's store.

    Raises:
        ProtocolError: if the future is of another executor. Names `what` it was given to, its maker and both stores.
    """
    if isinstance(value, BatchFuture | CallFuture) and value.store is not store:
        made_by = value.expression.describe_makers() if isinstance(value, BatchFuture) else value.maker
        raise ProtocolError(
            f"{what} belongs to one executor (its store is a {type(store).__name__}) and got a {type(value).__name__} "
            f"of another (of {made_by}, in a {type(value.store).__name__}). Build both with one executor, or give its "
            ".result()"
        )


def _left_until(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


def _check_deadline(timeout_s: object) -> None:
    if timeout_s is not None:
        _check_config.seconds("timeout_s", timeout_s)


STAYS_HERE = (
    "a future travels only as an argument of a group's method, by itself. Take it out of the list, dict or object it "
    "is in, or give the method its .result()"
)
