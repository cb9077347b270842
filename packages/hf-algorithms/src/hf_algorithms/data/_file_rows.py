"""Rows of files, one file after the other, read when they are asked for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, Protocol, Self, TypeVar, overload

from hf_algorithms.data._order import RowOrder
from hf_algorithms.data._tables import Table
from hf_protocols.errors import DataError

__all__ = ["FileRows", "RecordFile", "build_order", "locate"]

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class RecordFile(Protocol[R_co]):
    """A file whose records become rows."""

    @property
    def table(self) -> Table:
        """Its records."""
        ...

    @property
    def source(self) -> int:
        """Number of the source that it belongs to; a source may be several files."""
        ...

    def build_row(self, record: Mapping[str, Any], number: int) -> R_co:
        """Returns the row of a record.

        Raises:
            DataError: for a record that is not such a row, with its place.
        """
        ...

    def describe(self) -> str:
        """Returns a line with its format, how many rows it has, and what its columns are."""
        ...


class FileRows(Sequence[R]):
    """Rows of one or more files, read when they are asked for.

    Args:
        files: at least one.
        weights: of the sources, for the share of their rows in a batch; None: they are one set.
        first: uses that many rows; None: all.
    """

    def __init__(
        self, files: Sequence[RecordFile[R]], weights: Sequence[float] | None = None, *, first: int | None = None
    ) -> None:
        self.weights = None if weights is None else tuple(weights)
        self.files: tuple[RecordFile[R], ...] = tuple(files)
        self._starts = list(accumulate((len(each.table) for each in files), initial=0))
        self._length = self._starts[-1] if first is None else min(first, self._starts[-1])

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(self._length))]
        file, row = self._find(index)
        return file.build_row(file.table.record(row), row)

    def __iter__(self) -> Iterator[R]:
        return islice(self._all(), self._length)

    def first(self, num_rows: int) -> Self:
        """The first rows, as one set."""
        return type(self)(self.files, first=min(num_rows, self._length))

    def record(self, index: int) -> Mapping[str, Any]:
        """The record of a row, with every column of its file."""
        file, row = self._find(index)
        return file.table.record(row)

    def where(self, index: int) -> str:
        """Place of a row, such as `train.jsonl, line 3`."""
        file, row = self._find(index)
        return file.table.where(row)

    @property
    def source_sizes(self) -> list[int]:
        """Rows of each source."""
        sizes = dict.fromkeys((each.source for each in self.files), 0)
        for each in self.files:
            sizes[each.source] += len(each.table)
        return list(sizes.values())

    def _all(self) -> Iterator[R]:
        for file in self.files:
            for row, record in enumerate(file.table.records()):
                yield file.build_row(record, row)

    def _find(self, index: int) -> tuple[RecordFile[R], int]:
        row = index + self._length if index < 0 else index
        if not 0 <= row < self._length:
            raise IndexError(f"row {index} of {self._length}")
        file = bisect_right(self._starts, row) - 1
        return self.files[file], row - self._starts[file]


def build_order(rows: Sequence[Any], kept: Sequence[int], *, source: str) -> RowOrder:
    """The order in which the rows that are kept are drawn, each counted by its place among them.

    Args:
        rows: all of them.
        kept: numbers of those that are not dropped, in order.
        source: of the rows, for messages.

    Raises:
        DataError: if a source with a weight has no row left.
    """
    if not isinstance(rows, FileRows) or rows.weights is None:
        return RowOrder([len(kept)])
    ends = [bisect_left(kept, end) for end in accumulate(rows.source_sizes)]
    sizes = [end - start for start, end in pairwise([0, *ends])]
    if 0 in sizes:
        raise DataError(
            f"{source}: data.too_long = 'drop' leaves no row of its source {sizes.index(0) + 1}. Leave that "
            "source out, or set data.too_long = 'truncate_left'"
        )
    return RowOrder(sizes, rows.weights)


def locate(rows: Sequence[Any], number: int, *, source: str) -> str:
    """Place of a row for messages, such as `data.train = 'train.jsonl', line 3`."""
    if isinstance(rows, FileRows) and len(rows.files) > 1:
        return f"{source.partition(' = ')[0]}: {rows.where(number)}"
    unit = rows.where(number).rpartition(", ")[2] if isinstance(rows, FileRows) else f"line {number + 1}"
    return f"{source}, {unit}"
