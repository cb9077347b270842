"""Rows of a batch: an ordered list of row numbers, kept as intervals."""

from __future__ import annotations

import heapq
import math
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, starmap
from operator import index

from hf_protocols.errors import BatchError
from hf_protocols.validation import Checks, show

__all__ = ["RowSelection", "split_rows"]

_check = Checks(BatchError)

_MOST_CHUNKS = 2**20


@dataclass(frozen=True)
class RowSelection:
    """Row numbers in order, as half-open intervals; iterating yields the integers.

    Intervals that touch are merged, so equal selections compare equal. A row may occur more than once
    (`RowSelection.from_rows([0, 0, 1])`), as it does after a repeat.

    Raises:
        BatchError: for an interval that is empty, reversed, starts below zero or ends above 2**63 - 1; for more rows
            than that; for values that are not intervals.
    """

    intervals: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        try:
            intervals = tuple(self.intervals)
            if set(map(type, chain.from_iterable(intervals))) - {int}:  # numbers of small dtypes wrap around
                intervals = tuple([(index(start), index(stop)) for start, stop in intervals])
            merged = _merge(intervals)
        except BatchError:
            raise
        except (TypeError, ValueError):
            raise BatchError(
                f"RowSelection({show(self.intervals)}). Use pairs (start, stop) of whole numbers; of row numbers, "
                "RowSelection.from_rows([0, 2])"
            ) from None
        num_rows = sum([stop - start for start, stop in merged])
        if num_rows > sys.maxsize:
            raise BatchError(f"a selection of {show(num_rows)} rows is longer than {sys.maxsize}. Select fewer rows")
        object.__setattr__(self, "intervals", tuple(merged))
        object.__setattr__(self, "_num_rows", num_rows)

    @classmethod
    def range(cls, start: int, stop: int) -> RowSelection:
        """Returns rows `start` to `stop - 1`; an empty selection if both are equal."""
        return cls() if start == stop else cls(((start, stop),))

    @classmethod
    def from_rows(cls, rows: Iterable[int]) -> RowSelection:
        """The given row numbers, in the given order; of an array or a tensor in any dtype of whole numbers."""
        if isinstance(rows, range) and rows.step == 1:
            return cls.range(rows.start, max(rows.start, rows.stop))
        try:
            given = list(rows)
            is_mask = bool(given) and _is_truth(given[0])
            intervals = () if is_mask else tuple([(row, row + 1) for row in map(index, given)])
        except TypeError:
            raise BatchError(f"RowSelection.from_rows({show(rows)}). Use row numbers, such as [0, 2]") from None
        if is_mask:
            raise BatchError(
                f"RowSelection.from_rows({show(rows)}): a mask is not a list of row numbers. Use the positions of its "
                "True entries"
            )
        return cls(intervals)

    def __len__(self) -> int:
        num_rows: int = self.__dict__["_num_rows"]
        return num_rows

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(starmap(range, self.intervals))

    def __add__(self, other: RowSelection) -> RowSelection:
        _check.kind("a RowSelection + other", other, RowSelection, "a RowSelection")
        return RowSelection(self.intervals + other.intervals)

    def take(self, positions: RowSelection) -> RowSelection:
        """Returns the rows at `positions` of this selection: a selection of a selection.

        Raises:
            IndexError: for a position beyond the end.
        """
        _check.kind("take: positions", positions, RowSelection, "a RowSelection")
        ends, intervals = self._ends, self.intervals
        taken: list[tuple[int, int]] = []
        for start, stop in positions.intervals:
            if stop > len(self):
                raise IndexError(f"position {stop - 1} of a selection of {len(self)} rows")
            at = bisect_right(ends, start)
            while start < stop:
                low, high = intervals[at]
                base = ends[at] - (high - low)
                upto = min(stop, ends[at])
                taken.append((low + start - base, low + upto - base))
                start, at = upto, at + 1
        return RowSelection(tuple(taken))

    def repeat(self, times: int) -> RowSelection:
        """Returns the rows after each became `times` consecutive rows: row r is then r*times ... r*times+times-1.

        Raises:
            BatchError: if `times` is below one or not a whole number.
        """
        _check.kind("repeat: times", times, int, "a whole number")
        if times < 1:
            raise BatchError(f"rows cannot be repeated {show(times)} times. Repeat them at least once")
        return RowSelection(tuple((start * times, stop * times) for start, stop in self.intervals))

    def __reduce__(self) -> tuple[Callable[[array[int]], RowSelection], tuple[array[int]]]:
        """Pickles as bare borders or rows, at most 4 bytes a row below row 2**32: selections travel with every call."""
        code = "q" if self.end >= 2**32 else "I"
        if len(self) < 2 * len(self.intervals):
            return _from_rows, (array(code, self),)
        return _from_borders, (array(code, chain.from_iterable(self.intervals)),)

    @cached_property
    def end(self) -> int:
        """One more than the highest row number; 0 without rows."""
        return max([stop for _, stop in self.intervals], default=0)

    @cached_property
    def _ends(self) -> list[int]:
        """Number of rows up to and including each interval."""
        return list(accumulate(stop - start for start, stop in self.intervals))


def split_rows(
    num_rows: int, num_chunks: int, weights: Sequence[float] | None = None, *, what: str = "chunks"
) -> list[RowSelection]:
    """Splits `num_rows` rows into `num_chunks` selections whose sizes differ by at most one, larger first.

    With `weights` (tokens per row) rows are chosen so that the largest token sum is never above that of the
    contiguous split; within a chunk rows ascend.

    Raises:
        BatchError: for fewer rows than chunks, no chunk, or weights that are not one finite number per row.
    """
    _check.sizes(num_rows, weights)
    _check.kind(what, num_chunks, int, "a whole number of them")
    if num_chunks < 1:
        raise BatchError(f"{num_rows} rows cannot be split into {show(num_chunks)} {what}. Use at least 1")
    if num_chunks > _MOST_CHUNKS:
        raise BatchError(f"{show(num_chunks)} {what} are more than {_MOST_CHUNKS}. Use fewer")
    if num_rows < num_chunks:
        raise BatchError(
            f"{num_rows} rows cannot be shared by {num_chunks} {what}: each needs at least one row. "
            f"Use a batch of at least {num_chunks} rows, or fewer {what}"
        )
    if weights is not None:
        _check.weights(weights, num_rows)
    small, larger = divmod(num_rows, num_chunks)
    ends = [small * (i + 1) + min(i + 1, larger) for i in range(num_chunks)]
    contiguous = [RowSelection.range(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True)]
    if weights is None:
        return contiguous
    balanced = _balance(weights, [len(chunk) for chunk in contiguous])
    # fsum does not depend on the order of the rows, so that equal splits weigh the same.
    heaviest = [max(math.fsum(map(weights.__getitem__, chunk)) for chunk in s) for s in (balanced, contiguous)]
    return balanced if heaviest[0] < heaviest[1] else contiguous


def _balance(weights: Sequence[float], sizes: Sequence[int]) -> list[RowSelection]:
    """Assigns the heaviest row first, each to the lightest chunk that still has room."""
    chosen: list[list[int]] = [[] for _ in sizes]
    lightest = [(0.0, chunk) for chunk in range(len(sizes))]
    for row in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        load, chunk = heapq.heappop(lightest)
        chosen[chunk].append(row)
        if len(chosen[chunk]) < sizes[chunk]:
            heapq.heappush(lightest, (load + weights[row], chunk))
    return [RowSelection.from_rows(sorted(rows)) for rows in chosen]


def _is_truth(row: object) -> bool:
    """True if `row` is an entry of a mask: of a list, an array or a tensor."""
    return type(row) is not int and "bool" in str(getattr(row, "dtype", type(row)))


def _merge(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the intervals with those that touch merged."""
    merged: list[tuple[int, int]] = []
    first, last = 0, -1
    for start, stop in intervals:
        if not 0 <= start < stop <= sys.maxsize:
            shown = f"interval {show((start, stop))}"
            if stop > start >= 0:
                raise BatchError(f"{shown} ends above the largest row number {sys.maxsize}")
            raise BatchError(f"{shown} is empty, reversed or negative; 0 <= start < stop must hold")
        if start != last:
            if last >= 0:
                merged.append((first, last))
            first = start
        last = stop
    if last >= 0:
        merged.append((first, last))
    return merged


def _from_rows(rows: array[int]) -> RowSelection:
    return RowSelection.from_rows(rows)


def _from_borders(borders: array[int]) -> RowSelection:
    return RowSelection(tuple(zip(borders[::2], borders[1::2], strict=True)))
