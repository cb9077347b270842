"""Row and column algebra of batches as a lazy tree: pure, without tensors.

A tree says how a batch follows from the results of earlier calls (its sources). It is small and picklable: it travels
to the ranks in place of the batch, and each rank asks it only where its own rows are (`Expression.locate`).
Rows are row numbers of the tree's own (logical) order. `ShardTable` says in which shards the rows of a source lie.

A program's loops make trees as deep as they are long, so nothing here recurses over a tree, and pickle does not either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

from hf_controller.data.transport import Column, Shard
from hf_protocols import BatchError, Collection, RowIndex, RowSelection, compute_held_rows
from hf_protocols.validation import show

__all__ = [
    "Expression",
    "Extent",
    "Extents",
    "Leaf",
    "Measures",
    "Segment",
    "ShardTable",
    "Source",
    "Wanted",
    "check_alike",
    "choose_columns",
    "list_columns",
]

Value = TypeVar("Value")

_MAX_NAMED = 5


@dataclass(frozen=True)
class Extent:
    """Facts about a source that are needed to locate rows: its number of rows and its column names."""

    num_rows: int
    columns: tuple[str, ...]


class Source:
    """A leaf: the result of one call, or a batch that was put.

    Args:
        shards: one handle per collected rank, opaque here; a rank process looks the shard's metadata up with it.
        call: the pending call on the controller's side; it does not travel.
        columns: names of its columns where they are known beforehand; they do not travel either.
        maker: what made it, for messages, such as `"actor.generate_sequences"`.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        call: Any = None,
        columns: Sequence[str] | None = None,
        maker: str = "executor.put",
    ) -> None:
        self.shards = tuple(shards)
        self.call = call
        self.columns = None if columns is None else tuple(columns)
        self.maker = maker

    def __reduce__(self) -> tuple[type[Source], tuple[Any, ...]]:
        return Source, (self.shards, None, None, self.maker)


Extents = Mapping[Source, Extent]


@dataclass(frozen=True)
class Segment:
    """Rows of one column of one source; `rows` are the source's logical rows, in the wanted order."""

    source: Source
    column: str
    rows: RowSelection


class Expression(ABC):
    """A node of the tree. Each kind defines how it follows from its children; the walks are in this class.

    `extents` must have every source below the node.
    """

    def children(self) -> tuple[Expression, ...]:
        """The nodes right below this one."""
        return ()

    def parameters(self) -> tuple[Any, ...]:
        """Returns the values that make up the node in addition to its children."""
        return ()

    @classmethod
    def over(cls, children: Sequence[Expression], *parameters: Any) -> Expression:
        """A node of this kind over `children`."""
        kind: Any = cls
        node: Expression = kind(*children, *parameters)
        return node

    def num_rows(self, extents: Extents) -> int:
        """Number of rows."""
        return self._count_rows(extents)[id(self)]

    def leading(self) -> Expression:
        """Returns a tree of as many rows over fewer sources: keeps the left side of every union."""
        return self.fold(lambda node, below: node._lead(below))[id(self)]

    def columns(self, extents: Extents) -> tuple[str, ...]:
        """Column names, in order."""
        return self._name_columns(extents)[id(self)]

    def columns_over(self, below: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """Column names, given those of the nodes right below this one.

        Raises:
            BatchError: if they do not fit this node; it names what made the batch.
        """
        return _name_makers(self, self._columns, below, {})

    def locate(self, rows: RowSelection, columns: Sequence[str], extents: Extents) -> dict[str, list[Segment]]:
        """Finds the source segments of `rows` of each of `columns`, in order; `columns` must exist."""
        measures = Measures(self, extents)
        found: dict[str, list[Segment]] = {name: [] for name in columns}
        stack = [Wanted(self, rows, {name: name for name in columns})]
        while stack:
            wanted = stack.pop()
            node = wanted.node
            if isinstance(node, Leaf):
                for name, own in wanted.names.items():
                    found[name].append(Segment(node.source, own, wanted.rows))
            else:
                stack.extend(reversed(node._descend(wanted, measures)))
        return found

    def sources(self) -> list[Source]:
        """Every source below, each once, left to right."""
        return list(dict.fromkeys(node.source for node in self.walk() if isinstance(node, Leaf)))

    def describe_makers(self) -> str:
        """Returns the makers of the sources below, for messages."""
        makers = list(dict.fromkeys(source.maker for source in self.sources()))
        more = f" and {len(makers) - _MAX_NAMED} more" if len(makers) > _MAX_NAMED else ""
        return ", ".join(makers[:_MAX_NAMED]) + more

    def walk(self) -> list[Expression]:
        """All nodes from here down, each once, children before parents and left before right."""
        order: dict[int, Expression] = {}
        stack: list[Expression] = [self]
        while stack:
            node = stack[-1]
            missing: list[Expression] = []
            for child in node.children():
                if id(child) not in order:
                    if missing or child.children():
                        missing.append(child)
                    else:
                        order[id(child)] = child
            if missing:
                stack += reversed(missing)
            else:
                order.setdefault(id(node), stack.pop())
        return list(order.values())

    def fold(self, rule: Callable[[Expression, list[Value]], Value]) -> dict[int, Value]:
        """Maps each node's id to the result of `rule`, which gets the node and the results of its children."""
        values: dict[int, Value] = {}
        for node in self.walk():
            values[id(node)] = rule(node, [values[id(child)] for child in node.children()])
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as a list of nodes, each with its children's places in the list."""
        order = self.walk()
        places = {id(node): place for place, node in enumerate(order)}
        nodes = [(type(node), [places[id(child)] for child in node.children()], node.parameters()) for node in order]
        return _build, (nodes,)

    def _count_rows(self, extents: Extents) -> dict[int, int]:
        return self.fold(lambda node, below: _name_makers(node, node._num_rows, below, extents))

    def _name_columns(self, extents: Extents) -> dict[int, tuple[str, ...]]:
        return self.fold(lambda node, below: _name_makers(node, node._columns, below, extents))

    def _lead(self, below: Sequence[Expression]) -> Expression:
        """The node of `leading`, given the children's."""
        is_same = all(new is old for new, old in zip(below, self.children(), strict=True))
        return self if is_same else self.over(below, *self.parameters())

    @abstractmethod
    def _num_rows(self, below: Sequence[int], extents: Extents) -> int:
        """Number of rows, given the children's."""

    @abstractmethod
    def _columns(self, below: Sequence[tuple[str, ...]], extents: Extents) -> tuple[str, ...]:
        """Column names, given the children's."""

    @abstractmethod
    def _descend(self, wanted: Wanted, measures: Measures) -> list[Wanted]:
        """Translates a request for rows of this node into requests for rows of its children, in order."""


def _name_makers(
    node: Expression, rule: Callable[[Sequence[Value], Extents], Value], below: Sequence[Value], extents: Extents
) -> Value:
    """Returns the result of `rule`; its error names the makers of the batch."""
    try:
        return rule(below, extents)
    except BatchError as error:
        raise BatchError(f"{error}; the batch comes from {node.describe_makers()}") from None


def _build(nodes: Sequence[tuple[type[Expression], Sequence[int], tuple[Any, ...]]]) -> Expression:
    built: list[Expression] = []
    for kind, places, parameters in nodes:
        built.append(kind.over([built[place] for place in places], *parameters))
    return built[-1]


@dataclass(frozen=True)
class Wanted:
    """Rows of some columns of a node; `names` maps the reader's name of a column to the node's name."""

    node: Expression
    rows: RowSelection
    names: Mapping[str, str]


class Measures:
    """Rows and columns of every node of a tree, worked out once and when first asked for."""

    def __init__(self, root: Expression, extents: Extents) -> None:
        self._root = root
        self._extents = extents
        self._ends: dict[int, list[int]] = {}

    def num_rows(self, node: Expression) -> int:
        """Number of rows of `node`."""
        return self._counts[id(node)]

    def columns(self, node: Expression) -> tuple[str, ...]:
        """Column names of `node`."""
        return self._names[id(node)]

    def ends(self, node: Expression) -> list[int]:
        """Rows of a node's children up to and including each of them."""
        if id(node) not in self._ends:
            self._ends[id(node)] = list(accumulate(map(self.num_rows, node.children())))
        return self._ends[id(node)]

    @cached_property
    def _counts(self) -> dict[int, int]:
        return self._root._count_rows(self._extents)

    @cached_property
    def _names(self) -> dict[int, tuple[str, ...]]:
        return self._root._name_columns(self._extents)


@dataclass(frozen=True)
class Leaf(Expression):
    """All rows and columns of a source."""

    source: Source

    def parameters(self) -> tuple[Any, ...]:
        return (self.source,)

    def num_rows(self, extents: Extents) -> int:
        """Number of rows."""
        return extents[self.source].num_rows

    def columns(self, extents: Extents) -> tuple[str, ...]:
        """Column names, in order."""
        return extents[self.source].columns

    def walk(self) -> list[Expression]:
        """This node."""
        return [self]

    def __reduce__(self) -> tuple[Any, ...]:
        return Leaf, (self.source,)

    def _num_rows(self, below: Sequence[int], extents: Extents) -> int:
        return self.num_rows(extents)

    def _columns(self, below: Sequence[tuple[str, ...]], extents: Extents) -> tuple[str, ...]:
        return self.columns(extents)

    def _descend(self, wanted: Wanted, measures: Measures) -> list[Wanted]:
        return []


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
            check_alike(name, columns, lambda: f"the results of the ranks of {maker}")
        self.extent = Extent(sum(shard.num_rows for shard in self.shards), names)
        self.held = _compute_held(self.shards, maker)

    def find(self, rows: RowSelection) -> list[tuple[Shard, RowSelection]]:
        """The shards that hold `rows`, each with its local rows, in order."""
        if len(self.shards) == 1 and rows == self.held[0]:  # everything: no index is needed
            return [(self.shards[0], RowSelection.range(0, len(rows)))]
        pieces = self._index.find(rows)
        return [(self.shards[piece.producer], piece.rows) for piece in pieces] or [(self.shards[0], RowSelection())]

    @cached_property
    def _index(self) -> RowIndex:
        return RowIndex(self.held)


def _compute_held(shards: Sequence[Shard], maker: str) -> dict[int, RowSelection]:
    """Rows follow the input's order where the method says so, else the order of the shards."""
    selections = [shard.selection for shard in shards if shard.selection is not None]
    num_inputs, num_rows = sum(map(len, selections)), sum(shard.num_rows for shard in shards)
    if len(selections) == len(shards) and num_inputs and num_rows:
        times = num_rows // num_inputs
        if any(shard.num_rows != len(rows) * times for shard, rows in zip(shards, selections, strict=True)):
            counts = ", ".join(f"{len(rows)} -> {s.num_rows}" for s, rows in zip(shards, selections, strict=True))
            raise BatchError(
                f"{maker} is registered with rows='times' and made another number of rows of an input row on each rank "
                f"({counts}). Register it with rows='unknown'"
            )
        collection = Collection(ranks=tuple(range(len(shards))), combine="concat")
        return compute_held_rows(collection, selections, shards[0].input_rows, times=times)
    held, start = {}, 0
    for index, shard in enumerate(shards):
        held[index] = RowSelection.range(start, start + shard.num_rows)
        start += shard.num_rows
    return held


def check_alike(name: str, parts: Sequence[tuple[Column, int]], describe: Callable[[], str]) -> None:
    """Refuses to join columns of different kinds, although torch would join some of them with the type of the first.

    Args:
        name: of the column.
        parts: metadata and number of rows of each.
        describe: says what the parts are, in a message.

    Raises:
        BatchError: naming two kinds.
    """
    if len(parts) == 1:
        return
    kinds = list(dict.fromkeys(_describe_kind(column) for column, num_rows in parts if num_rows))
    if len(kinds) > 1:
        raise BatchError(
            f"column {show(name)} is {kinds[0]} and {kinds[1]} in {describe()}. Make them alike, with .to(dtype) or a "
            "reshape in the method that returns it"
        )


def _describe_kind(column: Column) -> str:
    rows = ["rows"] if column.lengths is None else ["rows", "tokens"]
    return f"{column.dtype} [{', '.join([*rows, *map(str, column.row_shape)])}]"


def choose_columns(asked: Iterable[str], existing: Sequence[str], what: str) -> tuple[str, ...]:
    """The asked names that exist, each once; a name that ends in `?` may be missing.

    Raises:
        BatchError: if a name without `?` does not exist; it lists those that do.
    """
    asked = list(asked)
    missing = [name for name in asked if not name.endswith("?") and name not in existing]
    if missing:
        raise BatchError(f"{what} asks for {list_columns(missing)}; the batch has {list_columns(existing)}")
    return tuple(name for name in dict.fromkeys(each.removesuffix("?") for each in asked) if name in existing)


def list_columns(names: Iterable[str]) -> str:
    """Names in a message."""
    return ", ".join(sorted(names)) or "no columns"
