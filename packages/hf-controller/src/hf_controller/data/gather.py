"""A reader's side: find the shards of its rows, fetch the columns it reads, and build one TensorDict of them.

Shards on this machine are read as whole arrays; of shards on other machines, slices are fetched. A column is a view if
its rows are neighbours in one shard, otherwise one copy; or it is viewed in runs of rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hf_controller.data.buffer_pool import allocate_rows
from hf_controller.data.expressions import Expression, Extent, ShardTable, Source, check_alike
from hf_controller.data.jagged import JaggedShape, JaggedShapes, compute_offsets
from hf_controller.data.transport import Column, ObjectStore, Shard, SliceReply, SliceRequest, as_tensor
from hf_controller.failures import Failure, UpstreamFailure
from hf_protocols import RowSelection, route

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Assembly", "BatchReader", "CachedShard", "ColumnRead", "ColumnRuns", "Part", "ShardCache"]

# Up to this many runs of neighbouring rows are copied run by run; beyond it, by index.
_MAX_RUNS = 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of torch by their bytes."""


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
    def remote_bytes(self) -> int:
        """Bytes of columns that came from other machines."""
        return self._holder.remote_bytes

    def look_up(self, expressions: Iterable[Expression]) -> None:
        """Fetches the metadata of every source below `expressions`.

        Raises:
            UpstreamFailure: if the call behind a source failed.
            WorkerTimeoutError: if it is not done in time.
        """
        sources = dict.fromkeys(source for expression in expressions for source in expression.sources())
        missing = [source for source in sources if source not in self._tables]
        handles = [each for source in missing for each in source.shards if not isinstance(each, Shard | Failure)]
        values = iter(self._store.get(handles, self._timeout_s) if handles else [])
        for source in missing:
            shards: list[Any] = [each if isinstance(each, Shard | Failure) else next(values) for each in source.shards]
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
        seen: set[tuple[tuple[Shard, int | None], ...]] = set()
        distinct: list[torch.Tensor] = []
        for taken in located.values():
            key = tuple((each.shard, each.column.lengths) for each in taken)
            if key in seen or any(position is None for _, position in key):
                continue
            seen.add(key)
            assembly = Assembly([Part(number, each.rows) for number, each in enumerate(taken)])
            lengths = assembly.build_dense(self._holder.lengths(taken))
            if not any(torch.equal(lengths, other) for other in distinct):  # calls answer with columns of equal lengths
                distinct.append(lengths)
        return torch.stack(distinct).sum(0, dtype=torch.float64).tolist() if distinct else None

    def written_columns(self) -> list[str]:
        """Columns that were written in place since they were read, though others share their memory."""
        return self._holder.written_columns()

    def _locate(
        self, expression: Expression, rows: RowSelection, columns: Sequence[str]
    ) -> dict[str, list[ColumnRead]]:
        """For every column the shards' local rows, in order."""
        located = expression.locate(rows, columns, self.extents)
        routes: dict[tuple[Source, int], list[tuple[Shard, RowSelection]]] = {}
        taken: dict[str, list[ColumnRead]] = {}
        for name, segments in located.items():
            taken[name] = []
            for segment in segments:
                # Columns of one source share the very same selection, so it is routed once.
                key = (segment.source, id(segment.rows))
                if key not in routes:
                    routes[key] = self._tables[segment.source].find(segment.rows)
                taken[name] += [ColumnRead(shard, segment.column, local) for shard, local in routes[key]]
            parts = [(each.column, len(each.rows)) for each in taken[name]]
            check_alike(name, parts, lambda: f"the parts that concat joins, from {expression.describe_makers()}")
        return taken

    def _build(self, taken: Sequence[ColumnRead], held: Sequence[tuple[CachedShard, RowSelection]]) -> torch.Tensor:
        if len(taken) == 1 and taken[0].rows == RowSelection.range(0, taken[0].shard.num_rows):
            return self._build_whole(taken[0], held[0][0])
        assembly, firsts = self._assemble(taken, held)
        arrays = [held[first][0].values(taken[first].name) for first in firsts]
        lengths = [
            held[first][0].lengths(position)
            for first in firsts
            if (position := taken[first].column.lengths) is not None
        ]
        if not lengths:
            dense = assembly.build_dense(arrays)
            self.bytes_read += dense.nbytes
            return dense
        values, shape = assembly.build_jagged(arrays, lengths, self._shapes)
        self.bytes_read += values.nbytes
        return shape.fill(values)

    def _build_whole(self, taken: ColumnRead, cached: CachedShard) -> torch.Tensor:
        """All rows of a shard in their order."""
        values, position = cached.values(taken.name), taken.column.lengths
        self.bytes_read += values.nbytes
        # Each reader has its own view: one may ask for its gradient.
        return values[:] if position is None else self._shapes.of(cached.lengths(position)).fill(values)

    def _assemble(
        self, taken: Sequence[ColumnRead], held: Sequence[tuple[CachedShard, RowSelection]]
    ) -> tuple[Assembly, list[int]]:
        """The assembly of a column, one for all columns with the same rows, and where each array first stands."""
        numbers: dict[tuple[CachedShard, str], int] = {}
        parts = []
        firsts = []
        for index, (each, (cached, rows)) in enumerate(zip(taken, held, strict=True)):
            if (cached, each.name) not in numbers:
                numbers[cached, each.name] = len(numbers)
                firsts.append(index)
            parts.append(Part(numbers[cached, each.name], rows))
        if tuple(parts) not in self._assemblies:
            self._assemblies[tuple(parts)] = Assembly(parts)
        return self._assemblies[tuple(parts)], firsts


def _count_bytes(column: Any) -> int:
    values = column.values() if column.is_nested else column
    return int(values.numel() * values.element_size())


@dataclass(frozen=True, eq=False)
class ColumnRead:
    """Local rows taken from one column of one shard, in order."""

    shard: Shard
    name: str
    rows: RowSelection

    @property
    def column(self) -> Column:
        """The column's description."""
        return self.shard.columns[self.name]


class CachedShard:
    """Arrays of a shard that are here, as tensors.

    Args:
        columns: descriptions of the columns.
        arrays: arrays by column name.
        lengths: int32 [rows] by position.
    """

    def __init__(self, columns: Mapping[str, Column], arrays: Mapping[str, Any], lengths: Mapping[int, Any]) -> None:
        self._columns = columns
        self._arrays = arrays
        self._raw_lengths = lengths
        self.tensors: dict[str, torch.Tensor] = {}
        self._lengths: dict[int, torch.Tensor] = {}

    def values(self, name: str) -> torch.Tensor:
        """A column's values; the same tensor every time."""
        if name not in self.tensors:
            self.tensors[name] = as_tensor(self._arrays[name], self._columns[name].dtype)
        return self.tensors[name]

    def lengths(self, position: int) -> torch.Tensor:
        """Tokens per row; the same tensor every time."""
        if position not in self._lengths:
            self._lengths[position] = as_tensor(self._raw_lengths[position])
        return self._lengths[position]


class ShardCache:
    """Fetches what a reader takes, all at once, and each shard once.

    Attributes:
        remote_bytes: bytes of columns that came from other machines.
    """

    def __init__(self, store: ObjectStore, timeout_s: float) -> None:
        self.remote_bytes = 0
        self._store = store
        self._timeout_s = timeout_s
        self._whole: dict[Shard, CachedShard] = {}
        self._slices: dict[tuple[Shard, RowSelection], dict[str, CachedShard]] = {}

    def hold(self, wanted: Sequence[ColumnRead]) -> list[tuple[CachedShard, RowSelection]]:
        """Returns, for each of `wanted`, the arrays that hold it and its rows in these arrays."""
        by_shard: dict[Shard, list[ColumnRead]] = {}
        for each in wanted:
            by_shard.setdefault(each.shard, []).append(each)
        sliced: dict[ColumnRead, RowSelection] = {}
        for shard, taken in by_shard.items():
            if self._pays_to_slice(shard, taken):
                covers = _cover(taken)
                sliced |= {each: covers[each.name] for each in taken}
        self._fetch([each.shard for each in wanted if each not in sliced], sliced)
        return [
            self._find_slice(each, sliced[each]) if each in sliced else (self._whole[each.shard], each.rows)
            for each in wanted
        ]

    def lengths(self, wanted: Sequence[ColumnRead]) -> list[torch.Tensor]:
        """Returns the tokens per row of each one's shard; of shards on other machines nothing else is fetched."""
        far = dict.fromkeys(
            each for each in wanted if each.shard not in self._whole and self._store.is_far(each.shard.origin)
        )
        self._fetch([each.shard for each in wanted if each not in far], {})
        requests = [SliceRequest((), RowSelection.range(0, each.shard.num_rows), (_lengths_of(each),)) for each in far]
        handles = [self._store.request(each.shard, request) for each, request in zip(far, requests, strict=True)]
        replies = dict(zip(far, self._store.get(handles, self._timeout_s) if handles else [], strict=True))
        return [
            as_tensor(replies[each].lengths[_lengths_of(each)])
            if each in replies
            else self._whole[each.shard].lengths(_lengths_of(each))
            for each in wanted
        ]

    def written_columns(self) -> list[str]:
        """Columns whose shared memory was written in place since they were fetched, by torch's count of such writes."""
        cached_shards = [*self._whole.values(), *(h for by_name in self._slices.values() for h in by_name.values())]
        return sorted({name for each in cached_shards for name, tensor in each.tensors.items() if tensor._version})

    def _pays_to_slice(self, shard: Shard, taken: Sequence[ColumnRead]) -> bool:
        """True for a shard on another machine, unless it is taken as a whole: a whole shard moves in one piece."""
        if shard in self._whole or not self._store.is_far(shard.origin):
            return False
        everything = RowSelection.range(0, shard.num_rows)
        return {each.name for each in taken} != set(shard.columns) or any(each.rows != everything for each in taken)

    def _fetch(self, whole: Iterable[Shard], sliced: Mapping[ColumnRead, RowSelection]) -> None:
        shards = [shard for shard in dict.fromkeys(whole) if shard not in self._whole]
        columns: dict[tuple[Shard, RowSelection], dict[str, Column]] = {}
        for taken, cover in sliced.items():
            if taken.name not in self._slices.get((taken.shard, cover), {}):
                columns.setdefault((taken.shard, cover), {})[taken.name] = taken.column
        requests = [
            self._store.request(shard, SliceRequest(tuple((c.position, c.lengths) for c in by_name.values()), cover))
            for (shard, cover), by_name in columns.items()
        ]
        handles = [*(shard.arrays for shard in shards), *requests]
        values = self._store.get(handles, self._timeout_s) if handles else []
        for shard, arrays in zip(shards, values, strict=False):
            self._keep_whole(shard, arrays)
        for ((shard, cover), by_name), reply in zip(columns.items(), values[len(shards) :], strict=True):
            self._keep_slice(shard, cover, by_name, reply)

    def _keep_whole(self, shard: Shard, arrays: Sequence[Any]) -> None:
        by_name = {name: arrays[column.position] for name, column in shard.columns.items()}
        self._whole[shard] = CachedShard(shard.columns, by_name, dict(enumerate(arrays)))
        if self._store.is_far(shard.origin):
            self.remote_bytes += shard.num_bytes

    def _keep_slice(self, shard: Shard, cover: RowSelection, columns: Mapping[str, Column], reply: SliceReply) -> None:
        cached = CachedShard(shard.columns, dict(zip(columns, reply.values, strict=True)), reply.lengths)
        self._slices.setdefault((shard, cover), {}).update(dict.fromkeys(columns, cached))
        self.remote_bytes += sum(values.nbytes for values in reply.values)

    def _find_slice(self, taken: ColumnRead, cover: RowSelection) -> tuple[CachedShard, RowSelection]:
        cached = self._slices[taken.shard, cover][taken.name]
        if taken.rows == cover:
            return cached, RowSelection.range(0, len(cover))
        pieces = route({0: cover}, [taken.rows]).pieces[0]
        return cached, pieces[0].rows if pieces else RowSelection()


def _cover(taken: Sequence[ColumnRead]) -> dict[str, RowSelection]:
    """The rows that are taken of each column of a shard, each once and ascending."""
    selections: dict[str, list[RowSelection]] = {}
    for each in taken:
        selections.setdefault(each.name, []).append(each.rows)
    return {
        name: rows[0]
        if len(rows) == 1 and _ascends(rows[0])
        else RowSelection.from_rows(sorted({row for each in rows for row in each}))
        for name, rows in selections.items()
    }


def _lengths_of(taken: ColumnRead) -> int:
    assert taken.column.lengths is not None
    return taken.column.lengths


def _ascends(rows: RowSelection) -> bool:
    ends = [0]
    for start, stop in rows.intervals:
        if start < ends[-1]:
            return False
        ends.append(stop)
    return True


@dataclass(frozen=True)
class Part:
    """Rows to take, in order, from array number `array`: several parts may take from one array."""

    array: int
    rows: RowSelection


_Integers = npt.NDArray[np.int64]


class _Moves(NamedTuple):
    """Rows, or tokens, that move from one array into the result: numpy's, whose calls cost less than torch's."""

    array: int
    source: _Integers
    target: _Integers


class Assembly:
    """Assembles the rows of one or more columns from arrays; indices are computed once for all columns.

    Args:
        parts: what to take, in the order of the result.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._runs = [(part.array, start, stop) for part in parts for start, stop in part.rows.intervals]
        self._tokens: dict[tuple[int, ...], tuple[torch.Tensor, list[_Moves]]] = {}

    def build_dense(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """[rows, *row_shape] from arrays of that form."""
        if not self._runs:
            return arrays[0][:0]
        if len(self._runs) == 1:
            array, start, stop = self._runs[0]
            return arrays[array][start:stop]
        if len(self._runs) <= _MAX_RUNS:
            return _join([arrays[array][start:stop] for array, start, stop in self._runs])
        return _scatter(arrays, self._row_indices)

    def build_jagged(
        self, arrays: Sequence[torch.Tensor], lengths: Sequence[torch.Tensor], shapes: JaggedShapes
    ) -> tuple[torch.Tensor, JaggedShape]:
        """Flat values [tokens, *row_shape] and their shape from flat values [all tokens, *row_shape], lengths [rows].

        `lengths` of several columns that are the same objects are worked out once.
        """
        shape = shapes.of(self.build_dense(lengths))
        if len(self._runs) <= _MAX_RUNS:
            starts = [compute_offsets(each) for each in lengths]
            spans = [(array, int(starts[array][low]), int(starts[array][high])) for array, low, high in self._runs]
            pieces = [arrays[array][low:high] for array, low, high in spans]
            values = arrays[0][:0] if not pieces else pieces[0] if len(pieces) == 1 else _join(pieces)
        else:
            values = _scatter(arrays, self._token_indices(lengths, shape.offsets))
        return values, shape

    @cached_property
    def _row_indices(self) -> list[_Moves]:
        """For every array that is read: its rows, and their places in the result."""
        arrays, starts, stops = np.array(self._runs, dtype=np.int64).T
        counts = stops - starts
        places = counts.cumsum() - counts
        moves = []
        for array in dict.fromkeys(arrays.tolist()):
            runs = arrays == array
            moves.append(_Moves(array, *(_count_on(each[runs], counts[runs]) for each in (starts, places))))
        return moves

    def _token_indices(self, lengths: Sequence[torch.Tensor], offsets: torch.Tensor) -> list[_Moves]:
        key = tuple(map(id, lengths))
        if key not in self._tokens:
            places = offsets.numpy()
            moves = []
            for array, source, target in self._row_indices:
                counts = lengths[array].numpy()[source].astype(np.int64)
                starts = compute_offsets(lengths[array]).numpy()[source]
                moves.append(_Moves(array, _count_on(starts, counts), _count_on(places[target], counts)))
            self._tokens[key] = offsets, moves
        return self._tokens[key][1]


def _count_on(starts: _Integers, counts: _Integers) -> _Integers:
    """Expands runs: for each run as many consecutive numbers as its count, from its start on, one run after another."""
    ends = counts.cumsum()
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    found: _Integers = np.repeat(starts, counts) + within
    return found


def _join(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of `pieces` one after another, in new memory."""
    result = allocate_rows(sum(map(len, pieces)), pieces[0])
    return torch.cat(list(pieces), out=result)


def _scatter(arrays: Sequence[torch.Tensor], moves: Sequence[_Moves]) -> torch.Tensor:
    total = sum(len(each.target) for each in moves)
    result = allocate_rows(total, arrays[moves[0].array])
    bits = _as_bits(result)
    if len(moves) == 1:  # its places follow one another
        torch.index_select(_as_bits(arrays[moves[0].array]), 0, torch.from_numpy(moves[0].source), out=bits)
        return result
    for array, source, target in moves:
        rows = _as_bits(arrays[array]).index_select(0, torch.from_numpy(source))
        bits.index_copy_(0, torch.from_numpy(target), rows)
    return result


def _as_bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of equal width: torch copies no float8 and no wide unsigned rows by index."""
    integers = _INTEGERS.get(values.element_size())
    return values if integers is None else values.view(integers)


class ColumnRuns:
    """A column in pieces.

    Args:
        taken: what is taken, in order.
        held: for each the arrays that have it, and its rows in them.
        shapes: those of the reader.
    """

    def __init__(
        self, taken: Sequence[ColumnRead], held: Sequence[tuple[CachedShard, RowSelection]], shapes: JaggedShapes
    ) -> None:
        self._shapes = shapes
        self._runs = [
            (each, cached, start, stop)
            for each, (cached, rows) in zip(taken, held, strict=True)
            for start, stop in rows.intervals
        ]
        self._empty = (taken[0], held[0][0], 0, 0)
        self._ends = list(accumulate(stop - start for _, _, start, stop in self._runs))

    @property
    def borders(self) -> list[int]:
        """Rows at which a run ends."""
        return self._ends

    def view(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop - 1` of the column, which lie within one run."""
        run = bisect_right(self._ends, start) if start < stop else -1
        taken, cached, first, last = self._runs[run] if run >= 0 else self._empty
        offset = 0 if run <= 0 else self._ends[run - 1]
        low, high = first + start - offset, first + stop - offset
        assert run < 0 or high <= last
        values = cached.values(taken.name)
        if taken.column.lengths is None:
            return values[low:high]
        lengths = cached.lengths(taken.column.lengths)
        begin, shape = int(lengths[:low].sum()), self._shapes.of(lengths[low:high])
        return shape.fill(values[begin : begin + int(shape.offsets[-1])])
