"""Which rows of a batch: an ordered list of row numbers, kept as intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

__all__ = ["RowSelection"]


@dataclass(frozen=True)
class RowSelection:
    """Row numbers in order, as half-open intervals; iterating yields the integers.

    Intervals that touch are merged, so equal selections compare equal. A row may stand more than once
    (``RowSelection.from_rows([0, 0, 1])``), as it does after a repeat.

    Raises:
        ValueError: for an interval that is empty, reversed or starts below zero.
    """

    intervals: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        merged: list[tuple[int, int]] = []
        last_start, last_stop = 0, -1
        for start, stop in self.intervals:
            if start < 0 or stop <= start:
                raise ValueError(f"interval ({start}, {stop}) is empty, reversed or negative: give 0 <= start < stop")
            if start == last_stop:
                last_stop = stop
                merged[-1] = (last_start, stop)
            else:
                last_start, last_stop = start, stop
                merged.append((start, stop))
        object.__setattr__(self, "intervals", tuple(merged))

    @classmethod
    def range(cls, start: int, stop: int) -> RowSelection:
        """Rows ``start`` to ``stop - 1``; none when both are equal."""
        return cls() if start == stop else cls(((start, stop),))

    @classmethod
    def from_rows(cls, rows: Iterable[int]) -> RowSelection:
        """The given row numbers, in the given order."""
        return cls(tuple((row, row + 1) for row in rows))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.intervals:
            yield from range(start, stop)

    def __add__(self, other: RowSelection) -> RowSelection:
        return RowSelection(self.intervals + other.intervals)

    def take(self, positions: RowSelection) -> RowSelection:
        """The rows that stand at ``positions`` of this selection: a selection of a selection.

        Raises:
            IndexError: for a position beyond the end.
        """
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
        """The rows after every row became ``times`` consecutive ones: row r is then r*times ... r*times+times-1.

        Raises:
            ValueError: if ``times`` is below one.
        """
        if times < 1:
            raise ValueError(f"rows cannot be repeated {times} times: give 1 or more")
        return RowSelection(tuple((start * times, stop * times) for start, stop in self.intervals))

    @cached_property
    def _ends(self) -> list[int]:
        """Number of rows up to and including each interval."""
        return list(accumulate(stop - start for start, stop in self.intervals))
