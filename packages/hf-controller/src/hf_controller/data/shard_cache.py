"""A reader's arrays: whole shards where they are on this machine, slices of those that are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_controller.data.transport import Column, ObjectStore, Shard, SliceReply, SliceRequest, as_tensor
from hf_protocols import RowSelection, route

if TYPE_CHECKING:
    import torch

__all__ = ["Holding", "ShardCache", "Taken"]


@dataclass(frozen=True, eq=False)
class Taken:
    """Local rows taken from one column of one shard, in order."""

    shard: Shard
    name: str
    rows: RowSelection

    @property
    def column(self) -> Column:
        """The column's description."""
        return self.shard.columns[self.name]


class Holding:
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
        bytes_from_afar: bytes of columns that came from other machines.
    """

    def __init__(self, store: ObjectStore, timeout_s: float) -> None:
        self.bytes_from_afar = 0
        self._store = store
        self._timeout_s = timeout_s
        self._whole: dict[Shard, Holding] = {}
        self._slices: dict[tuple[Shard, RowSelection], dict[str, Holding]] = {}

    def hold(self, wanted: Sequence[Taken]) -> list[tuple[Holding, RowSelection]]:
        """For each of `wanted` the arrays that have it, and its rows in them."""
        by_shard: dict[Shard, list[Taken]] = {}
        for each in wanted:
            by_shard.setdefault(each.shard, []).append(each)
        sliced: dict[Taken, RowSelection] = {}
        for shard, taken in by_shard.items():
            if self._pays_to_slice(shard, taken):
                covers = _cover(taken)
                sliced |= {each: covers[each.name] for each in taken}
        self._fetch([each.shard for each in wanted if each not in sliced], sliced)
        return [
            self._find_slice(each, sliced[each]) if each in sliced else (self._whole[each.shard], each.rows)
            for each in wanted
        ]

    def lengths(self, wanted: Sequence[Taken]) -> list[torch.Tensor]:
        """Tokens of every row of each one's shard; of far shards nothing else is fetched."""
        far = [each for each in wanted if each.shard not in self._whole and self._store.is_far(each.shard.origin)]
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
        holdings = [*self._whole.values(), *(h for by_name in self._slices.values() for h in by_name.values())]
        return sorted({name for each in holdings for name, tensor in each.tensors.items() if tensor._version})

    def _pays_to_slice(self, shard: Shard, taken: Sequence[Taken]) -> bool:
        """Not for a shard that is taken as a whole: that one moves in one piece."""
        if shard in self._whole or not self._store.is_far(shard.origin):
            return False
        everything = RowSelection.range(0, shard.num_rows)
        return {each.name for each in taken} != set(shard.columns) or any(each.rows != everything for each in taken)

    def _fetch(self, whole: Iterable[Shard], sliced: Mapping[Taken, RowSelection]) -> None:
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
        self._whole[shard] = Holding(shard.columns, by_name, dict(enumerate(arrays)))
        if self._store.is_far(shard.origin):
            self.bytes_from_afar += shard.num_bytes

    def _keep_slice(self, shard: Shard, cover: RowSelection, columns: Mapping[str, Column], reply: SliceReply) -> None:
        holding = Holding(shard.columns, dict(zip(columns, reply.values, strict=True)), reply.lengths)
        self._slices.setdefault((shard, cover), {}).update(dict.fromkeys(columns, holding))
        self.bytes_from_afar += sum(values.nbytes for values in reply.values)

    def _find_slice(self, taken: Taken, cover: RowSelection) -> tuple[Holding, RowSelection]:
        holding = self._slices[taken.shard, cover][taken.name]
        if taken.rows == cover:
            return holding, RowSelection.range(0, len(cover))
        pieces = route({0: cover}, [taken.rows]).pieces[0]
        return holding, pieces[0].rows if pieces else RowSelection()


def _cover(taken: Sequence[Taken]) -> dict[str, RowSelection]:
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


def _lengths_of(taken: Taken) -> int:
    assert taken.column.lengths is not None
    return taken.column.lengths


def _ascends(rows: RowSelection) -> bool:
    ends = [0]
    for start, stop in rows.intervals:
        if start < ends[-1]:
            return False
        ends.append(stop)
    return True
