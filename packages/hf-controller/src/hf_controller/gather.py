"""A reader's side: find the shards of its rows, fetch the columns it reads, and build one TensorDict of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_controller.assembly import Assembly, Part
from hf_controller.expressions import Expression, Extent, Segment, Source
from hf_controller.failures import Failure, UpstreamFailure
from hf_controller.transport import Column, ObjectStore, Shard, as_tensor
from hf_protocols import BatchError, Collection, RowSelection, compute_held_rows, route

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["BatchReader", "Table"]


class Table:
    """A source whose metadata is known: its shards, and which logical rows each holds in its local order.

    Raises:
        BatchError: if the shards disagree about columns, or about how many rows an input row became.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        names = tuple(self.shards[0].columns)
        for index, shard in enumerate(self.shards):
            if set(shard.columns) != set(names):
                raise BatchError(
                    f"the ranks of one call returned different columns: {', '.join(sorted(names))} first, "
                    f"{', '.join(sorted(shard.columns))} from collected rank number {index}"
                )
        self.extent = Extent(sum(shard.num_rows for shard in self.shards), names)
        self.held = _compute_held(self.shards)


def _compute_held(shards: Sequence[Shard]) -> dict[int, RowSelection]:
    """Rows follow the input's order where the method says so, else the order of the shards."""
    selections = [shard.selection for shard in shards if shard.selection is not None]
    num_inputs = sum(map(len, selections))
    if len(selections) == len(shards) and num_inputs:
        times = sum(shard.num_rows for shard in shards) // num_inputs
        if any(shard.num_rows != len(rows) * times for shard, rows in zip(shards, selections, strict=True)):
            counts = ", ".join(f"{len(rows)} -> {s.num_rows}" for s, rows in zip(shards, selections, strict=True))
            raise BatchError(
                "a method registered with rows='times' made another number of rows of an input row on each rank "
                f"({counts}): register it with rows='unknown'"
            )
        collection = Collection(ranks=tuple(range(len(shards))), combine="concat")
        return compute_held_rows(collection, selections, shards[0].input_rows, times=times)
    held, start = {}, 0
    for index, shard in enumerate(shards):
        held[index] = RowSelection.range(start, start + shard.num_rows)
        start += shard.num_rows
    return held


@dataclass(frozen=True, eq=False)
class _Taken:
    """Local rows taken from one column of one shard, in order."""

    shard: Shard
    name: str
    rows: RowSelection

    @property
    def column(self) -> Column:
        return self.shard.columns[self.name]


class BatchReader:
    """Reads batches out of a store. Metadata and arrays are fetched once for as long as the reader lives.

    Attributes:
        bytes_read: bytes of all rows that were read so far.
    """

    def __init__(self, store: ObjectStore, timeout_s: float) -> None:
        self.bytes_read = 0
        self._store = store
        self._timeout_s = timeout_s
        self._tables: dict[Source, Table] = {}
        self._arrays: dict[tuple[Shard, str], torch.Tensor] = {}
        self._lengths: dict[Shard, list[torch.Tensor]] = {}
        self._assemblies: dict[tuple[tuple[int, RowSelection], ...], Assembly] = {}

    def look_up(self, expressions: Iterable[Expression]) -> None:
        """Fetch the metadata of every source below ``expressions``.

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
            self._tables[source] = Table(shards)

    @property
    def extents(self) -> Mapping[Source, Extent]:
        """Rows and columns of every source that was looked up."""
        return {source: table.extent for source, table in self._tables.items()}

    def read(self, expression: Expression, rows: RowSelection, columns: Sequence[str]) -> TensorDict:
        """``rows`` of ``columns``, in that order, as one batch on the host.

        Where the rows of a column are neighbours in one shard, the tensor is a view of shared memory.
        """
        from tensordict import TensorDict

        located = self._locate(expression, rows, columns)
        self._fetch([taken for column in located.values() for taken in column])
        return TensorDict({name: self._build(taken) for name, taken in located.items()}, batch_size=[len(rows)])

    def row_weights(self, expression: Expression, num_rows: int) -> list[float] | None:
        """Tokens per row over all jagged columns, equal lengths counted once; None without jagged columns."""
        located = self._locate(expression, RowSelection.range(0, num_rows), expression.columns(self.extents))
        seen: dict[tuple[tuple[Shard, int | None], ...], torch.Tensor] = {}
        for taken in located.values():
            key = tuple((each.shard, each.column.lengths) for each in taken)
            if key in seen or any(index is None for _, index in key):
                continue
            self._fetch(taken, lengths_only=True)
            assembly, places = self._assemble(taken)
            seen[key] = assembly.build_dense([self._lengths_of(each) for each in places])
        return torch.stack(list(seen.values())).sum(0, dtype=torch.float64).tolist() if seen else None

    def written_columns(self) -> list[str]:
        """Columns whose shared memory was written in place since they were read, by torch's count of such writes."""
        return sorted({name for (_, name), array in self._arrays.items() if array._version})

    def _locate(self, expression: Expression, rows: RowSelection, columns: Sequence[str]) -> dict[str, list[_Taken]]:
        """For every column the shards' local rows, in order."""
        located = expression.locate(rows, columns, self.extents)
        routes: dict[tuple[Source, int], list[tuple[Shard, RowSelection]]] = {}
        taken: dict[str, list[_Taken]] = {}
        for name, segments in located.items():
            taken[name] = []
            for segment in segments:
                # Columns of one source share the very same selection, so it is routed once.
                key = (segment.source, id(segment.rows))
                if key not in routes:
                    routes[key] = self._route(segment)
                taken[name] += [_Taken(shard, segment.column, local) for shard, local in routes[key]]
        return taken

    def _route(self, segment: Segment) -> list[tuple[Shard, RowSelection]]:
        table = self._tables[segment.source]
        pieces = route(table.held, [segment.rows]).pieces[0]
        if not pieces:
            return [(table.shards[0], RowSelection())]
        return [(table.shards[piece.producer], piece.rows) for piece in pieces]

    def _fetch(self, wanted: Sequence[_Taken], *, lengths_only: bool = False) -> None:
        """Get the arrays that are not here yet, all at once."""
        columns = {} if lengths_only else {(each.shard, each.name): each.column.handle for each in wanted}
        columns = {key: handle for key, handle in columns.items() if key not in self._arrays}
        jagged = {each.shard: each.shard.lengths for each in wanted if each.column.lengths is not None}
        jagged = {shard: handle for shard, handle in jagged.items() if shard not in self._lengths}
        handles = [*columns.values(), *jagged.values()]
        values = self._store.get(handles, self._timeout_s) if handles else []
        for (shard, name), array in zip(columns, values, strict=False):
            self._arrays[shard, name] = as_tensor(array, shard.columns[name].dtype)
        for shard, arrays in zip(jagged, values[len(columns) :], strict=True):
            self._lengths[shard] = [as_tensor(array) for array in arrays]

    def _lengths_of(self, taken: _Taken) -> torch.Tensor:
        assert taken.column.lengths is not None
        return self._lengths[taken.shard][taken.column.lengths]

    def _build(self, taken: Sequence[_Taken]) -> torch.Tensor:
        assembly, places = self._assemble(taken)
        arrays = [self._arrays[each.shard, each.name] for each in places]
        if places[0].column.lengths is None:
            built = assembly.build_dense(arrays)
            self.bytes_read += built.numel() * built.element_size()
            return built
        built = assembly.build_jagged(arrays, [self._lengths_of(each) for each in places])
        self.bytes_read += built.values().numel() * built.element_size()
        return built

    def _assemble(self, taken: Sequence[_Taken]) -> tuple[Assembly, list[_Taken]]:
        """The assembly of a column (one for all columns with the same rows), and one taken for each of its arrays."""
        places: dict[tuple[Shard, str], int] = {}
        for each in taken:
            places.setdefault((each.shard, each.name), len(places))
        numbers = [places[each.shard, each.name] for each in taken]
        key = tuple((number, each.rows) for number, each in zip(numbers, taken, strict=True))
        if key not in self._assemblies:
            self._assemblies[key] = Assembly(
                [Part(number, each.rows) for number, each in zip(numbers, taken, strict=True)]
            )
        firsts = [taken[numbers.index(number)] for number in range(len(places))]
        return self._assemblies[key], firsts
