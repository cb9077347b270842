"""A reader's side: find the shards of its rows, fetch the columns it reads, and build one TensorDict of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from hf_controller.data.assembly import Assembly, ColumnRuns, Part
from hf_controller.data.expressions import Expression, Extent, Source
from hf_controller.data.jagged import JaggedShapes
from hf_controller.data.shard_cache import Holding, ShardCache, Taken
from hf_controller.data.transport import Column, ObjectStore, Shard
from hf_controller.failures import Failure, UpstreamFailure
from hf_protocols import BatchError, Collection, RowIndex, RowSelection, compute_held_rows
from hf_protocols.validation import show

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["BatchReader", "ShardTable"]


class ShardTable:
    """A source whose metadata is known: its shards, and which logical rows each holds in its local order.

    Working it out takes time and memory in proportion to the shards: readers in one process share it.

    Args:
        shards: what the collected ranks returned.
        maker: the call that they returned it from, for messages.

    Raises:
        BatchError: if the shards disagree about columns, or about how many rows an input row became.
    """

    def __init__(self, shards: Sequence[Shard], maker: str) -> None:
        self.shards = tuple(shards)
        names = tuple(self.shards[0].columns)
        for index, shard in enumerate(self.shards):
            if set(shard.columns) != set(names):
                raise BatchError(
                    f"the ranks of {maker} returned different columns: {', '.join(sorted(names))} first, "
                    f"{', '.join(sorted(shard.columns))} from collected rank number {index}"
                )
        for name in names:
            columns = [(shard.columns[name], shard.num_rows) for shard in self.shards]
            _check_alike(name, columns, f"the results of the ranks of {maker}")
        self.extent = Extent(sum(shard.num_rows for shard in self.shards), names)
        self.held = _compute_held(self.shards, maker)

    def find(self, rows: RowSelection) -> list[tuple[Shard, RowSelection]]:
        """The shards that hold `rows`, each with its local rows, in order."""
        pieces = self._index.find(rows)
        return [(self.shards[piece.producer], piece.rows) for piece in pieces] or [(self.shards[0], RowSelection())]

    @cached_property
    def _index(self) -> RowIndex:
        return RowIndex(self.held)


def _compute_held(shards: Sequence[Shard], maker: str) -> dict[int, RowSelection]:
    """Rows follow the input's order where the method says so, else the order of the shards."""
    selections = [shard.selection for shard in shards if shard.selection is not None]
    num_inputs = sum(map(len, selections))
    if len(selections) == len(shards) and num_inputs:
        times = sum(shard.num_rows for shard in shards) // num_inputs
        if any(shard.num_rows != len(rows) * times for shard, rows in zip(shards, selections, strict=True)):
            counts = ", ".join(f"{len(rows)} -> {s.num_rows}" for s, rows in zip(shards, selections, strict=True))
            raise BatchError(
                f"{maker} is registered with rows='times' and made another number of rows of an input row on each rank "
                f"({counts}): register it with rows='unknown'"
            )
        collection = Collection(ranks=tuple(range(len(shards))), combine="concat")
        return compute_held_rows(collection, selections, shards[0].input_rows, times=times)
    held, start = {}, 0
    for index, shard in enumerate(shards):
        held[index] = RowSelection.range(start, start + shard.num_rows)
        start += shard.num_rows
    return held


class BatchReader:
    """Reads batches out of a store. Metadata and arrays are fetched once for as long as the reader lives.

    Args:
        store: where the batches lie.
        timeout_s: deadline of what is not there yet.
        tables: the tables of sources that other readers of this process looked up, to which this one adds; None: its
            own.

    Attributes:
        bytes_read: bytes of all rows that were read so far.
    """

    def __init__(
        self, store: ObjectStore, timeout_s: float, tables: MutableMapping[Source, ShardTable] | None = None
    ) -> None:
        self.bytes_read = 0
        self._store = store
        self._timeout_s = timeout_s
        self._holder = ShardCache(store, timeout_s)
        self._tables = {} if tables is None else tables
        self._assemblies: dict[tuple[Part, ...], Assembly] = {}
        self._shapes = JaggedShapes()

    @property
    def bytes_from_afar(self) -> int:
        """Bytes of columns that came from other machines."""
        return self._holder.bytes_from_afar

    def look_up(self, expressions: Iterable[Expression]) -> None:
        """Fetch the metadata of every source below `expressions`.

        Raises:
            UpstreamFailure: if the call behind a source failed.
            WorkerTimeoutError: if it is not done in time.
        """
        sources = dict.fromkeys(source for expression in expressions for source in expression.sources())
        missing = [source for source in sources if source not in self._tables]
        handles = [each for source in missing for each in source.shards if not isinstance(each, Shard)]
        values = iter(self._store.get(handles, self._timeout_s) if handles else [])
        for source in missing:
            shards = [each if isinstance(each, Shard) else next(values) for each in source.shards]
            for shard in shards:
                if isinstance(shard, Failure):
                    raise UpstreamFailure(shard)
            self._tables[source] = ShardTable(shards, source.maker)

    def look_up_value(self, handle: Any) -> Any:
        """Returns the object that another call returned. Raises the errors of `look_up`."""
        (outcome,) = self._store.get([handle], self._timeout_s)
        if isinstance(outcome, Failure):
            raise UpstreamFailure(outcome)
        return outcome.value

    @property
    def extents(self) -> Mapping[Source, Extent]:
        """Rows and columns of every source that was looked up."""
        return {source: table.extent for source, table in self._tables.items()}

    def read(self, expression: Expression, rows: RowSelection, columns: Sequence[str]) -> TensorDict:
        """Returns `rows` of `columns`, in that order, as one batch on the host.

        Where the rows of a column are neighbours in one shard on this machine, the tensor is a view of shared memory.
        """
        from tensordict import TensorDict

        located = self._locate(expression, rows, columns)
        wanted = [taken for column in located.values() for taken in column]
        held = iter(self._holder.hold(wanted))
        tensors = {name: self._build(taken, [next(held) for _ in taken]) for name, taken in located.items()}
        return TensorDict(tensors, batch_size=[len(rows)])

    def read_pieces(self, expression: Expression, rows: RowSelection, columns: Sequence[str]) -> list[TensorDict]:
        """Returns the rows of `read` as one or more consecutive batches, all of them views."""
        from tensordict import TensorDict

        located = self._locate(expression, rows, columns)
        held = iter(self._holder.hold([taken for column in located.values() for taken in column]))
        runs = {name: ColumnRuns(taken, [next(held) for _ in taken], self._shapes) for name, taken in located.items()}
        borders = sorted({0, len(rows)}.union(*(column.borders for column in runs.values())))
        pieces = []
        for start, stop in pairwise(borders if len(borders) > 1 else [0, 0]):
            tensors = {name: column.view(start, stop) for name, column in runs.items()}
            self.bytes_read += sum(map(_count_bytes, tensors.values()))
            pieces.append(TensorDict(tensors, batch_size=[stop - start]))
        return pieces

    def row_weights(self, expression: Expression, num_rows: int) -> list[float] | None:
        """Tokens per row over all jagged columns, equal lengths counted once; None without jagged columns."""
        located = self._locate(expression, RowSelection.range(0, num_rows), expression.columns(self.extents))
        seen: dict[tuple[tuple[Shard, int | None], ...], torch.Tensor] = {}
        for taken in located.values():
            key = tuple((each.shard, each.column.lengths) for each in taken)
            if key in seen or any(position is None for _, position in key):
                continue
            assembly = Assembly([Part(number, each.rows) for number, each in enumerate(taken)])
            seen[key] = assembly.build_dense(self._holder.lengths(taken))
        return torch.stack(list(seen.values())).sum(0, dtype=torch.float64).tolist() if seen else None

    def written_columns(self) -> list[str]:
        """Columns that were written in place since they were read, though others share their memory."""
        return self._holder.written_columns()

    def _locate(self, expression: Expression, rows: RowSelection, columns: Sequence[str]) -> dict[str, list[Taken]]:
        """For every column the shards' local rows, in order."""
        located = expression.locate(rows, columns, self.extents)
        routes: dict[tuple[Source, int], list[tuple[Shard, RowSelection]]] = {}
        taken: dict[str, list[Taken]] = {}
        for name, segments in located.items():
            taken[name] = []
            for segment in segments:
                # Columns of one source share the very same selection, so it is routed once.
                key = (segment.source, id(segment.rows))
                if key not in routes:
                    routes[key] = self._tables[segment.source].find(segment.rows)
                taken[name] += [Taken(shard, segment.column, local) for shard, local in routes[key]]
            parts = [(each.column, len(each.rows)) for each in taken[name]]
            _check_alike(name, parts, f"the parts that concat joins, from {expression.describe_makers()}")
        return taken

    def _build(self, taken: Sequence[Taken], held: Sequence[tuple[Holding, RowSelection]]) -> torch.Tensor:
        assembly, firsts = self._assemble(taken, held)
        arrays = [held[first][0].values(taken[first].name) for first in firsts]
        lengths = [
            held[first][0].lengths(position)
            for first in firsts
            if (position := taken[first].column.lengths) is not None
        ]
        built = assembly.build_jagged(arrays, lengths, self._shapes) if lengths else assembly.build_dense(arrays)
        self.bytes_read += _count_bytes(built)
        return built

    def _assemble(
        self, taken: Sequence[Taken], held: Sequence[tuple[Holding, RowSelection]]
    ) -> tuple[Assembly, list[int]]:
        """The assembly of a column, one for all columns with the same rows, and where each array first stands."""
        numbers: dict[tuple[Holding, str], int] = {}
        parts = []
        firsts = []
        for index, (each, (holding, rows)) in enumerate(zip(taken, held, strict=True)):
            if (holding, each.name) not in numbers:
                numbers[holding, each.name] = len(numbers)
                firsts.append(index)
            parts.append(Part(numbers[holding, each.name], rows))
        if tuple(parts) not in self._assemblies:
            self._assemblies[tuple(parts)] = Assembly(parts)
        return self._assemblies[tuple(parts)], firsts


def _check_alike(name: str, parts: Iterable[tuple[Column, int]], what: str) -> None:
    """Refuse columns of different kinds as one, though torch would join some of them: it takes the first one's type."""
    kinds = list(dict.fromkeys(_describe_kind(column) for column, num_rows in parts if num_rows))
    if len(kinds) > 1:
        raise BatchError(
            f"column {show(name)} is {kinds[0]} and {kinds[1]} in {what}: make them alike, with .to(dtype) or a "
            "reshape in "
            "the method that returns it"
        )


def _describe_kind(column: Column) -> str:
    rows = ["rows"] if column.lengths is None else ["rows", "tokens"]
    return f"{column.dtype} [{', '.join([*rows, *map(str, column.row_shape)])}]"


def _count_bytes(column: Any) -> int:
    values = column.values() if column.is_nested else column
    return int(values.numel() * values.element_size())
