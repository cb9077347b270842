"""One process's side of a call: read the rows, run the method, store the result.

A rank runtime holds the workers of one rank by role. It knows no executor: the caller passes a store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from hf_controller.data.algebra import Select
from hf_controller.data.columns import CallColumns, columns_of
from hf_controller.data.expressions import Expression, ShardTable, Source
from hf_controller.data.gather import BatchReader
from hf_controller.data.results import Outcome, publish
from hf_controller.data.transport import ObjectStore, Shard
from hf_controller.failures import Failure, UpstreamFailure
from hf_controller.groups.call import BatchArgument, Call, StoredArgument
from hf_controller.groups.worker import Worker, WorkerSpec, takes_pieces
from hf_controller.trace import CallReport, Span
from hf_protocols import BatchError, MethodSpec, ProtocolError, RowSelection, Topology, registered_methods
from hf_protocols.foreign_code import Caught

__all__ = ["CallShare", "RankRuntime", "Stage", "close_workers"]

_LOG = logging.getLogger(__name__)


class Stage(NamedTuple):
    """Current activity of the rank, as `describe()` reports it."""

    call: Call | None
    doing: str
    since_s: float

    def __str__(self) -> str:
        call = self.call
        where = f"call {call.call_id} {call.role}.{call.method}: {self.doing}" if call else self.doing
        return f"{where} for {time.time() - self.since_s:.1f} s"


@dataclass(slots=True)
class _CallProgress:
    """Progress of a call: a stage that it has not reached is 0."""

    ready_s: float = 0.0
    fetched_s: float = 0.0
    computed_s: float = 0.0
    has_returned: bool = False
    bytes_read: int = 0
    remote_bytes: int = 0


class _Inputs(NamedTuple):
    """A call's arguments as its method gets them."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    selection: RowSelection | None = None
    """This rank's rows of the first batch."""
    num_rows: int = 0
    """Rows of the whole of it."""
    reader: BatchReader | None = None
    """Knows whether shared memory was written."""


class CallShare:
    """The tables and splits that are the same for all ranks of a call; ranks in one process compute them once.

    The time for this grows with the number of ranks. Ranks in separate processes each spend it.

    Args:
        spec: the method's registration.
        topology: layout of the group.

    Attributes:
        tables: the sources of the call's inputs that were looked up so far.
    """

    def __init__(self, spec: MethodSpec, topology: Topology) -> None:
        self.tables: dict[Source, ShardTable] = {}
        self._spec = spec
        self._topology = topology
        self._splits: dict[int, list[RowSelection]] = {}
        self._collected: frozenset[int] | None = None

    def rows_of(self, rank: int, num_rows: int, weigh: Callable[[], list[float] | None]) -> RowSelection:
        """A rank's rows of a batch. Batches of equally many rows are split alike, so that their rows stay side by side.

        Args:
            rank: the rank.
            num_rows: rows of the whole batch.
            weigh: returns the tokens per row of the first such batch, or None.
        """
        if num_rows not in self._splits:
            self._splits[num_rows] = self._spec.protocol.distribute(self._topology, num_rows, weigh())
        return self._splits[num_rows][rank]

    def collects(self, rank: int) -> bool:
        """True if the rank's result is part of the call's."""
        if self._collected is None:
            self._collected = frozenset(self._spec.protocol.collect(self._topology).ranks)
        return rank in self._collected


class RankRuntime:
    """The workers of one rank, and how a call runs on them.

    Args:
        pool: name of the pool.
        name: name of the set of roles that share this process.
        rank: this rank.
        workers: the workers by role.
        specs: what they were built from, by role.
        store: where batches lie.
    """

    def __init__(
        self,
        *,
        pool: str,
        name: str,
        rank: int,
        workers: Mapping[str, Worker],
        specs: Mapping[str, WorkerSpec],
        store: ObjectStore,
    ) -> None:
        self.stage = Stage(None, "idle", time.time())
        self._pool = pool
        self._name = name
        self._rank = rank
        self._workers = dict(workers)
        self._specs = dict(specs)
        self._store = store
        self._collected: dict[tuple[str, str], bool] = {}
        self._methods = {role: registered_methods(spec.worker) for role, spec in specs.items()}

    def run(self, call: Call, share: CallShare | None = None) -> tuple[Outcome, CallReport]:
        """Runs one call. It never raises: what goes wrong is in the outcome, for readers, and in the report, for the
        controller.

        Args:
            call: the call.
            share: what other ranks of this process worked out for it; None: this rank is the only one here.
        """
        progress = _CallProgress()
        outcome: Outcome
        upstream = False
        context = self._workers[call.role].context
        context.sub_spans.clear()
        context.labels.clear()
        context.labels.update(call.labels)
        try:
            outcome = self._run(call, progress, share)
        except UpstreamFailure as error:
            outcome, upstream = error.failure, True
        except BaseException as error:  # noqa: BLE001 - the executor boundary: any exception travels to the controller
            outcome = Failure.of(
                error,
                role=call.role,
                method=call.method,
                rank=self._rank,
                origin=f"call {call.call_id}",
                has_returned=progress.has_returned,
            )
        return outcome, self._report(call, outcome, progress, upstream=upstream)

    def enter(self, doing: str) -> None:
        """Says what this rank is at between calls."""
        self.stage = Stage(None, doing, time.time())

    def close(self) -> None:
        """Closes every worker."""
        close_workers(self._workers, self._rank)

    def _run(self, call: Call, progress: _CallProgress, share: CallShare | None) -> Outcome:
        spec, worker = self._methods[call.role][call.method], self._workers[call.role]
        share = share or CallShare(spec, self._specs[call.role].topology)
        if call.after:
            self._enter(call, "waiting for the pool's earlier call")
            self._store.wait(list(call.after), call.timeout_s)
        method, columns = getattr(worker, call.method), columns_of(call.columns, spec)
        if any(isinstance(value, BatchArgument | StoredArgument) for value in (*call.args, *call.kwargs.values())):
            try:
                inputs = self._read_inputs(call, share, columns, takes_pieces(method), progress)
            except (BatchError, ProtocolError) as error:
                raise type(error)(f"{call.role}.{call.method}: {error}") from error
        else:
            inputs = _Inputs(call.args, call.kwargs)
            progress.ready_s = progress.fetched_s = time.time()
        self._enter(call, "computing")
        try:
            returned = method(*inputs.args, **inputs.kwargs)
        except BaseException as error:  # which stays the one that is raised: it may be Ctrl-C
            if damage := _describe_damage(call, inputs.reader):
                error.add_note(damage)
            raise
        finally:
            progress.computed_s = time.time()
        progress.has_returned = True
        if damage := _describe_damage(call, inputs.reader):
            raise BatchError(damage)
        if not self._is_collected(call, share):
            return None
        self._enter(call, "storing its result")
        what = f"{call.role}.{call.method}"
        return publish(
            returned,
            spec,
            columns,
            self._store,
            what=what,
            selection=inputs.selection,
            input_rows=inputs.num_rows,
        )

    def _read_inputs(
        self, call: Call, share: CallShare, columns: CallColumns, in_pieces: bool, progress: _CallProgress
    ) -> _Inputs:
        """Waits for what other calls left, and reads this rank's rows of it."""
        self._enter(call, "waiting for its inputs")
        reader = BatchReader(self._store, call.timeout_s, share.tables)
        given = [*call.args, *call.kwargs.values()]
        batches = [value for value in given if isinstance(value, BatchArgument)]
        values = [reader.look_up_value(v.handle) if isinstance(v, StoredArgument) else v for v in given]
        reader.look_up([batch.expression for batch in batches])
        progress.ready_s = time.time()
        self._enter(call, "fetching rows")
        try:
            for batch in batches if columns.readers else ():
                there = _before_choice(batch.expression, columns)
                columns.check(there.columns(reader.extents), there)
            selections, num_rows = self._select_rows(call.role, share, batches, reader)
            read = reader.read_pieces if in_pieces else reader.read
            for position, value in enumerate(given):
                if isinstance(value, BatchArgument):
                    expression = value.expression
                    values[position] = read(expression, selections[id(value)], expression.columns(reader.extents))
        finally:
            progress.bytes_read, progress.remote_bytes = reader.bytes_read, reader.remote_bytes
        progress.fetched_s = time.time()
        return _Inputs(
            values[: len(call.args)],
            dict(zip(call.kwargs, values[len(call.args) :], strict=True)),
            selections[id(batches[0])] if batches else None,
            num_rows,
            reader if batches else None,
        )

    def _select_rows(
        self, role: str, share: CallShare, batches: list[BatchArgument], reader: BatchReader
    ) -> tuple[dict[int, RowSelection], int]:
        """This rank's rows of every batch argument, by the argument's id, and the rows of the whole first one."""
        balanced = self._specs[role].balance_tokens
        selections: dict[int, RowSelection] = {}
        counts = [batch.expression.num_rows(reader.extents) for batch in batches]
        for batch, num_rows in zip(batches, counts, strict=True):
            if batch.whole:
                selections[id(batch)] = RowSelection.range(0, num_rows)
                continue
            weigh = partial(reader.row_weights, batch.expression, num_rows) if balanced else _weigh_nothing
            selections[id(batch)] = share.rows_of(self._rank, num_rows, weigh)
        return selections, counts[0] if counts else 0

    def _is_collected(self, call: Call, share: CallShare) -> bool:
        key = call.role, call.method
        if key not in self._collected:
            self._collected[key] = share.collects(self._rank)
        return self._collected[key]

    def _enter(self, call: Call, doing: str) -> None:
        self.stage = Stage(call, doing, time.time())

    def _report(self, call: Call, outcome: Outcome, progress: _CallProgress, *, upstream: bool) -> CallReport:
        end_s = time.time()
        # Without the call, whose inputs would stay referenced.
        self.stage = Stage(None, f"call {call.call_id} {call.role}.{call.method}: done, idle", end_s)
        ready_s = progress.ready_s or end_s
        fetched_s = progress.fetched_s or end_s
        shard = outcome if isinstance(outcome, Shard) else None
        failure = outcome if isinstance(outcome, Failure) else None
        span = Span(
            call_id=call.call_id,
            pool=self._pool,
            host=self._name,
            role=call.role,
            method=call.method,
            rank=self._rank,
            submit_s=call.submit_s,
            ready_s=ready_s,
            fetched_s=fetched_s,
            computed_s=progress.computed_s or end_s,
            end_s=end_s,
            bytes_read=progress.bytes_read,
            remote_bytes=progress.remote_bytes,
            bytes_written=shard.num_bytes if shard else 0,
            sub_spans=tuple(self._workers[call.role].context.sub_spans),
            failed=failure is not None,
            labels=call.labels,
            kind=call.kind,
        )
        return CallReport(span=span, num_rows=shard.num_rows if shard else 0, failure=failure, upstream=upstream)


def _weigh_nothing() -> None:
    return None


def _describe_damage(call: Call, reader: BatchReader | None) -> str:
    """Describes what the method wrote into shared memory; empty if nothing."""
    written = reader.written_columns() if reader is not None else []
    if not written:
        return ""
    return (
        f"{call.role}.{call.method} wrote in place into {', '.join(written)}, a view of memory that all readers share, "
        "so the batch is damaged for everybody. Clone the column before writing, and make the batch again"
    )


def _before_choice(expression: Expression, columns: CallColumns) -> Expression:
    """Returns an argument as it was before the call's columns were chosen, for errors that name all columns."""
    if columns.reads is None:
        return expression
    assert isinstance(expression, Select), "the controller chooses columns"
    return expression.batch


def close_workers(workers: Mapping[str, Worker], rank: int) -> None:
    """Closes the workers of a rank; what one raises is logged, and the others are closed all the same."""
    for role, worker in workers.items():
        with Caught() as caught:
            worker.close()
        if caught.error is not None:
            _LOG.warning("%s on rank %d: close() raised %s: %s", role, rank, type(caught.error).__name__, caught.error)
