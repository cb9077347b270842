"""Row and column algebra of batches as a lazy tree: pure, without tensors.

A tree says how a batch follows from the results of earlier calls (its sources). It is small and picklable: it travels
to the ranks in place of the batch, and each rank asks it only where its own rows are (:meth:`Expression.locate`).
Rows are row numbers of the tree's own (logical) order; where they lie in shards is the transport's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_protocols import BatchError, RowSelection, split_rows

__all__ = [
    "Chunk",
    "Concat",
    "Expression",
    "Extent",
    "Leaf",
    "Rename",
    "Repeat",
    "Rows",
    "Segment",
    "Select",
    "Source",
    "Union",
    "choose_columns",
]


@dataclass(frozen=True)
class Extent:
    """What must be known of a source before rows can be located: its number of rows and its column names."""

    num_rows: int
    columns: tuple[str, ...]


class Source:
    """A leaf: the result of one call, or a batch that was put.

    Args:
        shards: one handle per collected rank, opaque here; a rank process looks the shard's metadata up with it.
        call: the pending call on the controller's side; it does not travel.
        columns: names of its columns where they are known beforehand; they do not travel either.
    """

    def __init__(self, shards: Sequence[Any], call: Any = None, columns: Sequence[str] | None = None) -> None:
        self.shards = tuple(shards)
        self.call = call
        self.columns = None if columns is None else tuple(columns)

    def __reduce__(self) -> tuple[type[Source], tuple[Any, ...]]:
        return Source, (self.shards,)


Extents = Mapping[Source, Extent]


@dataclass(frozen=True)
class Segment:
    """Rows of one column of one source; ``rows`` are the source's logical rows, in the wanted order."""

    source: Source
    column: str
    rows: RowSelection


class Expression(ABC):
    """A node of the tree. ``extents`` must have every source below the node."""

    @abstractmethod
    def children(self) -> tuple[Expression, ...]:
        """The nodes right below this one."""

    @abstractmethod
    def num_rows(self, extents: Extents) -> int:
        """Number of rows."""

    @abstractmethod
    def columns(self, extents: Extents) -> tuple[str, ...]:
        """Column names, in order."""

    @abstractmethod
    def locate(self, rows: RowSelection, columns: Sequence[str], extents: Extents) -> dict[str, list[Segment]]:
        """Where ``rows`` of each of ``columns`` come from, in order; ``columns`` must exist."""

    def sources(self) -> list[Source]:
        """Every source below, each once, left to right."""
        found: dict[Source, None] = {}
        stack: list[Expression] = [self]
        while stack:
            node = stack.pop()
            if isinstance(node, Leaf):
                found[node.source] = None
            stack.extend(reversed(node.children()))
        return list(found)


@dataclass(frozen=True)
class Leaf(Expression):
    """All rows and columns of a source."""

    source: Source

    def children(self) -> tuple[Expression, ...]:
        return ()

    def num_rows(self, extents: Extents) -> int:
        return extents[self.source].num_rows

    def columns(self, extents: Extents) -> tuple[str, ...]:
        return extents[self.source].columns

    def locate(self, rows: RowSelection, columns: Sequence[str], extents: Extents) -> dict[str, list[Segment]]:
        return {name: [Segment(self.source, name, rows)] for name in columns}


@dataclass(frozen=True)
class Rows(Expression):
    """The chosen rows of a batch, in the chosen order; a row may be chosen more than once."""

    batch: Expression
    chosen: RowSelection

    def children(self) -> tuple[Expression, ...]:
        return (self.batch,)

    def num_rows(self, extents: Extents) -> int:
        beyond = max((stop for _, stop in self.chosen.intervals), default=0)
        available = self.batch.num_rows(extents)
        if beyond > available:
            raise BatchError(
                f"row {beyond - 1} was asked of a batch of {available} rows: rows go from 0 to its size - 1"
            )
        return len(self.chosen)

    def columns(self, extents: Extents) -> tuple[str, ...]:
        return self.batch.columns(extents)

    def locate(self, rows: RowSelection, columns: Sequence[str], extents: Extents) -> dict[str, list[Segment]]:
        return self.batch.locate(self.chosen.take(rows), columns, extents)


@dataclass(frozen=True)
class Chunk(Expression):
    """One of ``count`` consecutive parts whose sizes differ by at most one, larger first."""

    batch: Expression
    index: int
    count: int

    def children(self) -> tuple[Expression, ...]:
        return (self.batch,)

    def _chosen(self, extents: Extents) -> RowSelection:
        return split_rows(self.batch.num_rows(extents), self.count, what="parts of split(...)")[self.index]

    def num_rows(self, extents: Extents) -> int:
        return len(self._chosen(extents))

    def columns(self, extents: Extents) -> tuple[str, ...]:
        return self.batch.columns(extents)

    def locate(self, rows: RowSelection, columns: Sequence[str], extents: Extents) -> dict[str, list[Segment]]:
        return self.batch.locate(self._chosen(extents).take(rows), columns, extents)


@dataclass(frozen=True)
class Repeat(Expression):
    """Every row ``times`` times in a row: row r becomes rows r*times ... r*times+times-1."""

    batch: Expression
    times: int

    def children(self) -> tuple[Expression, ...]:
        return (self.batch,)

    def num_rows(self, extents: Extents) -> int:
        return self.batch.num_rows(extents) * self.times

    def columns(self, extents: Extents) -> tuple[str, ...]:
        return self.batch.columns(extents)

    def locate(self, rows: RowSelection, columns: Sequence[str], extents: Extents) -> dict[str, list[Segment]]:
        originals = rows if self.times == 1 else RowSelection.from_rows(row // self.times for row in rows)
        return self.batch.locate(originals, columns, extents)


@dataclass(frozen=True)
class Concat(Expression):
    """The rows of one batch after those of another; both have the same columns."""

    first: Expression
    second: Expression

    def children(self) -> tuple[Expression, ...]:
        return (self.first, self.second)

    def num_rows(self, extents: Extents) -> int:
        return self.first.num_rows(extents) + self.second.num_rows(extents)

    def columns(self, extents: Extents) -> tuple[str, ...]:
        first, second = self.first.columns(extents), self.second.columns(extents)
        if set(first) != set(second):
            raise BatchError(
                f"concat needs the same columns on both sides; only the first has {_listed(set(first) - set(second))}, "
                f"only the second has {_listed(set(second) - set(first))}: use .select(...) or .rename(...) first"
            )
        return first

    def locate(self, rows: RowSelection, columns: Sequence[str], extents: Extents) -> dict[str, list[Segment]]:
        border = self.first.num_rows(extents)
        found: dict[str, list[Segment]] = {name: [] for name in columns}
        for in_first, part in _runs(rows, border):
            located = (self.first if in_first else self.second).locate(part, columns, extents)
            for name, segments in located.items():
                found[name] += segments
        return found


@dataclass(frozen=True)
class Select(Expression):
    """Some columns of a batch; a name that ends in ``?`` is taken if it is there."""

    batch: Expression
    chosen: tuple[str, ...]

    def children(self) -> tuple[Expression, ...]:
        return (self.batch,)

    def num_rows(self, extents: Extents) -> int:
        return self.batch.num_rows(extents)

    def columns(self, extents: Extents) -> tuple[str, ...]:
        return choose_columns(self.chosen, self.batch.columns(extents), "select")

    def locate(self, rows: RowSelection, columns: Sequence[str], extents: Extents) -> dict[str, list[Segment]]:
        return self.batch.locate(rows, columns, extents)


@dataclass(frozen=True)
class Rename(Expression):
    """A batch with other names for some columns: pairs (old, new)."""

    batch: Expression
    names: tuple[tuple[str, str], ...]

    def children(self) -> tuple[Expression, ...]:
        return (self.batch,)

    def num_rows(self, extents: Extents) -> int:
        return self.batch.num_rows(extents)

    def columns(self, extents: Extents) -> tuple[str, ...]:
        existing = self.batch.columns(extents)
        choose_columns([old for old, _ in self.names], existing, "rename")
        new_names = dict(self.names)
        renamed = tuple(new_names.get(name, name) for name in existing)
        if len(set(renamed)) < len(renamed):
            raise BatchError(f"rename({new_names}) gives two columns one name among {_listed(existing)}")
        return renamed

    def locate(self, rows: RowSelection, columns: Sequence[str], extents: Extents) -> dict[str, list[Segment]]:
        old_names = {new: old for old, new in self.names}
        wanted = {name: old_names.get(name, name) for name in columns}
        located = self.batch.locate(rows, list(wanted.values()), extents)
        return {name: located[old] for name, old in wanted.items()}


@dataclass(frozen=True)
class Union(Expression):
    """The columns of two batches side by side, row by row; of a column on both sides the right one stays."""

    left: Expression
    right: Expression

    def children(self) -> tuple[Expression, ...]:
        return (self.left, self.right)

    def num_rows(self, extents: Extents) -> int:
        left, right = self.left.num_rows(extents), self.right.num_rows(extents)
        if left != right:
            raise BatchError(
                f"union needs equally many rows on both sides, got {left} (columns "
                f"{_listed(self.left.columns(extents))}) and {right} (columns {_listed(self.right.columns(extents))}): "
                "use .repeat(n) or .rows(...) first"
            )
        return left

    def columns(self, extents: Extents) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.left.columns(extents), *self.right.columns(extents))))

    def locate(self, rows: RowSelection, columns: Sequence[str], extents: Extents) -> dict[str, list[Segment]]:
        right = set(self.right.columns(extents))
        found = self.left.locate(rows, [name for name in columns if name not in right], extents)
        return found | self.right.locate(rows, [name for name in columns if name in right], extents)


def choose_columns(asked: Iterable[str], existing: Sequence[str], what: str) -> tuple[str, ...]:
    """The asked names that exist; a name that ends in ``?`` may be missing.

    Raises:
        BatchError: if a name without ``?`` does not exist; it lists those that do.
    """
    asked = list(asked)
    missing = [name for name in asked if not name.endswith("?") and name not in existing]
    if missing:
        raise BatchError(f"{what} asks for {_listed(missing)}; the batch has {_listed(existing)}")
    return tuple(name for name in (asked_name.removesuffix("?") for asked_name in asked) if name in existing)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no columns"


def _runs(rows: RowSelection, border: int) -> list[tuple[bool, RowSelection]]:
    """Cut ``rows`` where it crosses ``border``; rows from the border on are counted from it."""
    runs: list[tuple[bool, list[tuple[int, int]]]] = []
    for start, stop in rows.intervals:
        for in_first, low, high in ((True, start, min(stop, border)), (False, max(start, border), stop)):
            if low >= high:
                continue
            if not runs or runs[-1][0] is not in_first:
                runs.append((in_first, []))
            runs[-1][1].append((low, high) if in_first else (low - border, high - border))
    return [(in_first, RowSelection(tuple(intervals))) for in_first, intervals in runs]
