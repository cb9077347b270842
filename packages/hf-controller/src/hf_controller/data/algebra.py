"""The operations of the row and column algebra: how each kind of node follows from those right below it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hf_controller.data.expressions import Expression, Extents, Measures, Wanted, choose_columns, list_columns
from hf_protocols import BatchError, RowSelection, split_rows

__all__ = ["Chunk", "Concat", "Rename", "Repeat", "Rows", "Select", "Union"]


@dataclass(frozen=True)
class _OfOne(Expression):
    """A batch that follows from one other; by default it has the same rows and columns."""

    batch: Expression

    def children(self) -> tuple[Expression, ...]:
        return (self.batch,)

    def _num_rows(self, below: Sequence[int], extents: Extents) -> int:
        return below[0]

    def _columns(self, below: Sequence[tuple[str, ...]], extents: Extents) -> tuple[str, ...]:
        return below[0]

    def _descend(self, wanted: Wanted, measures: Measures) -> list[Wanted]:
        return [Wanted(self.batch, wanted.rows, wanted.names)]


@dataclass(frozen=True)
class Rows(_OfOne):
    """The chosen rows of a batch, in the chosen order; a row may be chosen more than once."""

    chosen: RowSelection

    def parameters(self) -> tuple[Any, ...]:
        return (self.chosen,)

    def _num_rows(self, below: Sequence[int], extents: Extents) -> int:
        if self.chosen.end > below[0]:
            raise BatchError(
                f"row {self.chosen.end - 1} was asked of a batch of {below[0]} rows: rows go from 0 to its size - 1"
            )
        return len(self.chosen)

    def _descend(self, wanted: Wanted, measures: Measures) -> list[Wanted]:
        return [Wanted(self.batch, self.chosen.take(wanted.rows), wanted.names)]


@dataclass(frozen=True)
class Chunk(_OfOne):
    """One of `count` consecutive parts whose sizes differ by at most one, larger first."""

    index: int
    count: int

    def parameters(self) -> tuple[Any, ...]:
        return self.index, self.count

    def _num_rows(self, below: Sequence[int], extents: Extents) -> int:
        return len(self._choose(below[0]))

    def _descend(self, wanted: Wanted, measures: Measures) -> list[Wanted]:
        chosen = self._choose(measures.num_rows(self.batch))
        return [Wanted(self.batch, chosen.take(wanted.rows), wanted.names)]

    def _choose(self, num_rows: int) -> RowSelection:
        return split_rows(num_rows, self.count, what="parts of split(...)")[self.index]


@dataclass(frozen=True)
class Repeat(_OfOne):
    """Each row repeated `times` times: row r becomes rows r*times ... r*times+times-1."""

    times: int

    def parameters(self) -> tuple[Any, ...]:
        return (self.times,)

    def _num_rows(self, below: Sequence[int], extents: Extents) -> int:
        return below[0] * self.times

    def _descend(self, wanted: Wanted, measures: Measures) -> list[Wanted]:
        rows = wanted.rows
        originals = rows if self.times == 1 else RowSelection.from_rows(row // self.times for row in rows)
        return [Wanted(self.batch, originals, wanted.names)]


@dataclass(frozen=True)
class Select(_OfOne):
    """Some columns of a batch; a name that ends in `?` is taken if it is there."""

    chosen: tuple[str, ...]

    def parameters(self) -> tuple[Any, ...]:
        return (self.chosen,)

    def _columns(self, below: Sequence[tuple[str, ...]], extents: Extents) -> tuple[str, ...]:
        return choose_columns(self.chosen, below[0], "select")


@dataclass(frozen=True)
class Rename(_OfOne):
    """A batch with other names for some columns: pairs (old, new)."""

    names: tuple[tuple[str, str], ...]

    def parameters(self) -> tuple[Any, ...]:
        return (self.names,)

    def _columns(self, below: Sequence[tuple[str, ...]], extents: Extents) -> tuple[str, ...]:
        existing = below[0]
        choose_columns([old for old, _ in self.names], existing, "rename")
        new_names = dict(self.names)
        renamed = tuple(new_names.get(name, name) for name in existing)
        if len(set(renamed)) < len(renamed):
            raise BatchError(f"rename({new_names}) gives two columns one name among {list_columns(existing)}")
        return renamed

    def _descend(self, wanted: Wanted, measures: Measures) -> list[Wanted]:
        old_names = {new: old for old, new in self.names}
        names = {name: old_names.get(own, own) for name, own in wanted.names.items()}
        return [Wanted(self.batch, wanted.rows, names)]


@dataclass(frozen=True)
class Concat(Expression):
    """The rows of several batches one after another; all have the same columns."""

    parts: tuple[Expression, ...]

    @classmethod
    def over(cls, children: Sequence[Expression], *parameters: Any) -> Expression:
        """Concatenates `children`; a child that is a concatenation itself is replaced by its parts."""
        parts = [child.parts if isinstance(child, Concat) else (child,) for child in children]
        return cls(tuple(chain.from_iterable(parts)))

    def children(self) -> tuple[Expression, ...]:
        return self.parts

    def _num_rows(self, below: Sequence[int], extents: Extents) -> int:
        return sum(below)

    def _columns(self, below: Sequence[tuple[str, ...]], extents: Extents) -> tuple[str, ...]:
        first = below[0]
        for number, columns in enumerate(below, 1):
            if columns != first and set(columns) != set(first):
                raise BatchError(
                    f"concat needs the same columns in every part; only the first has "
                    f"{list_columns(set(first) - set(columns))}, only number {number} has "
                    f"{list_columns(set(columns) - set(first))}. Use .select(...) or .rename(...) first"
                )
        return first

    def _descend(self, wanted: Wanted, measures: Measures) -> list[Wanted]:
        # An empty selection is taken from the first part, which knows the form of its columns.
        runs = _cut(wanted.rows, measures.ends(self)) or [(0, RowSelection())]
        return [Wanted(self.parts[part], rows, wanted.names) for part, rows in runs]


@dataclass(frozen=True)
class Union(Expression):
    """The columns of two batches side by side, row by row; of a column that both have, the right one is kept."""

    left: Expression
    right: Expression

    def children(self) -> tuple[Expression, ...]:
        return self.left, self.right

    def _lead(self, below: Sequence[Expression]) -> Expression:
        return below[0]

    def _num_rows(self, below: Sequence[int], extents: Extents) -> int:
        if below[0] != below[1]:
            sides = zip(below, self.children(), strict=True)
            left, right = (f"{count} (columns {list_columns(side.columns(extents))})" for count, side in sides)
            raise BatchError(
                f"union needs equally many rows on both sides, got {left} and {right}. Use .repeat(n) or .rows(...) "
                "first"
            )
        return below[0]

    def _columns(self, below: Sequence[tuple[str, ...]], extents: Extents) -> tuple[str, ...]:
        return tuple(dict.fromkeys(chain.from_iterable(below)))

    def _descend(self, wanted: Wanted, measures: Measures) -> list[Wanted]:
        on_right = set(measures.columns(self.right))
        left = {name: own for name, own in wanted.names.items() if own not in on_right}
        right = {name: own for name, own in wanted.names.items() if own in on_right}
        return [Wanted(s, wanted.rows, names) for s, names in ((self.left, left), (self.right, right)) if names]


def _cut(rows: RowSelection, ends: Sequence[int]) -> list[tuple[int, RowSelection]]:
    """Cuts `rows` at the borders of parts: pairs of a part and rows counted from its start, in order.

    Args:
        rows: rows of all parts together.
        ends: rows up to and including each part.
    """
    runs: list[tuple[int, list[tuple[int, int]]]] = []
    for first, stop in rows.intervals:
        start, part = first, bisect_right(ends, first)
        while start < stop:
            begin, upto = ends[part - 1] if part else 0, min(stop, ends[part])
            if start < upto:  # a part may have no rows
                if not runs or runs[-1][0] != part:
                    runs.append((part, []))
                runs[-1][1].append((start - begin, upto - begin))
            start, part = upto, part + 1
    return [(part, RowSelection(tuple(intervals))) for part, intervals in runs]
