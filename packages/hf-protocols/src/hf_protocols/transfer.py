"""Transfer protocols: distribution of a call's rows to ranks and collection of results (paper, section 4.1, Table 3).

A protocol is two pure functions over row numbers; nothing here touches a tensor. `route` joins the
result of one group's `collect` to the request of the next group's `distribute`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection as Sized
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from hf_protocols.errors import BatchError, ProtocolError
from hf_protocols.foreign_code import raised_as
from hf_protocols.selection import RowSelection
from hf_protocols.topology import Topology
from hf_protocols.validation import Checks, are_whole, show

__all__ = [
    "Collect",
    "Collection",
    "Distribute",
    "PerRank",
    "Piece",
    "Route",
    "RowIndex",
    "TransferProtocol",
    "compute_held_rows",
    "route",
]

_check_batch = Checks(BatchError)
_check_protocol = Checks(ProtocolError)

Item = TypeVar("Item")


@dataclass(frozen=True)
class Collection:
    """The ranks whose results make the result of a call, in order, and the way to combine them."""

    ranks: tuple[int, ...]
    combine: Literal["concat", "list"] = "concat"


class Distribute(Protocol):
    """(topology, num_rows, weights) -> one selection of rows per rank; `weights` are tokens per row."""

    def __call__(self, topology: Topology, num_rows: int, weights: Sequence[float] | None = None) -> list[RowSelection]:
        """Returns the rows of each rank."""
        ...


class Collect(Protocol):
    """topology -> the ranks whose results make the result of the call."""

    def __call__(self, topology: Topology) -> Collection:
        """Returns the collected ranks."""
        ...


@dataclass(frozen=True)
class TransferProtocol:
    """A rule that distributes the rows of a call over ranks and collects results.

    Your own protocol is a name and two functions; `hf_protocols.testing.check_transfer_protocol` tests it. Every
    result of the two functions is checked.

    Raises:
        ProtocolError: if a function is not callable; when called, if it returns a value of another kind or raises
            an error from outside this project. The message names the protocol.
    """

    name: str
    distribute: Distribute
    collect: Collect
    called: Literal["all", "collected"] = "all"
    """The ranks that take part in a call. A rank without rows gets an empty batch."""

    def __post_init__(self) -> None:
        if self.called not in ("all", "collected"):
            raise ProtocolError(f'protocol {show(self.name)}: called={show(self.called)}. Use "all" or "collected"')
        collect = _Collect(self.name, _own_function(self.collect))
        only_to = collect if self.called == "collected" else None
        object.__setattr__(self, "distribute", _Distribute(self.name, _own_function(self.distribute), only_to))
        object.__setattr__(self, "collect", collect)

    def __repr__(self) -> str:
        return f"TransferProtocol({self.name!r})"


@dataclass(frozen=True)
class _Distribute:
    """A protocol's function with checks of its results."""

    protocol: str
    function: Distribute
    only_to: _Collect | None

    def __call__(self, topology: Topology, num_rows: int, weights: Sequence[float] | None = None) -> list[RowSelection]:
        _check_batch.sizes(num_rows, weights)
        answer = _ask(self.protocol, "distribute", self.function, topology, num_rows, weights)
        if not isinstance(answer, list | tuple) or not all(isinstance(each, RowSelection) for each in answer):
            raise ProtocolError(
                f"protocol {show(self.protocol)}: distribute returned {show(answer)}. Return a list of RowSelections, "
                "one for each rank"
            )
        if len(answer) != topology.world_size:
            raise ProtocolError(
                f"protocol {show(self.protocol)} distributes to {len(answer)} ranks, the topology has "
                f"{topology.world_size}. Return one RowSelection for each rank"
            )
        called = range(topology.world_size) if self.only_to is None else self.only_to(topology).ranks
        for rank, rows in enumerate(answer):
            if rows.end > num_rows or (rows and rank not in called):
                least = num_rows if rank in called else 0
                wrong = next(max(start, least) for start, stop in rows.intervals if stop > least)
                why = "which does not exist" if rows.end > num_rows else 'and is not called. Set called="all"'
                raise ProtocolError(
                    f"protocol {show(self.protocol)} with {num_rows} rows: rank {rank} gets row [{wrong}], {why}"
                )
        return list(answer)


@dataclass(frozen=True)
class _Collect:
    """A protocol's function with checks of its results."""

    protocol: str
    function: Collect

    def __call__(self, topology: Topology) -> Collection:
        answer = _ask(self.protocol, "collect", self.function, topology)
        name, last = f"protocol {show(self.protocol)}", topology.world_size - 1
        if (
            not isinstance(answer, Collection)
            or not are_whole(answer.ranks)
            or answer.combine not in ("concat", "list")
        ):
            raise ProtocolError(
                f'{name}: collect returned {show(answer)}. Return Collection(ranks=(...), combine="concat" or "list")'
            )
        if not answer.ranks or len(set(answer.ranks)) < len(answer.ranks):
            raise ProtocolError(f"{name} collects the ranks {show(answer.ranks)}. Return at least one, each once")
        if not all(rank in range(topology.world_size) for rank in answer.ranks):
            raise ProtocolError(f"{name} collects the ranks {show(answer.ranks)}; the topology has ranks 0 to {last}")
        return answer


def _own_function(function: Any) -> Any:
    """Returns the unchecked function of a protocol that reuses another protocol's."""
    if not callable(function):
        raise ProtocolError(f"a TransferProtocol is a name and two functions, got {show(function)} for one of them")
    return function.function if isinstance(function, _Distribute | _Collect) else function


def _ask(protocol: str, what: str, function: Any, *inputs: Any) -> Any:
    _check_protocol.kind("topology", inputs[0], Topology, "a Topology")
    label = f"protocol {show(protocol)}: {what}"
    with raised_as(lambda error: ProtocolError(f"{label} raised {type(error).__name__}: {error}")):
        return function(*inputs)


@dataclass(frozen=True)
class PerRank(Generic[Item]):
    """One item for each rank, passed to `ALL_TO_ALL` in place of a batch.

    Raises:
        ProtocolError: for a value that is not a list of items.
    """

    items: Sequence[Item]

    def __post_init__(self) -> None:
        is_text = isinstance(self.items, str | bytes)
        wanted = "a list with one item for each rank"
        _check_protocol.kind("PerRank's items", self.items, type(None) if is_text else Sequence, wanted)


class Piece(NamedTuple):
    """Rows that a consumer takes from one producer: `rows` are the producer's own (local) row numbers."""

    producer: int
    rows: RowSelection


@dataclass(frozen=True)
class Route:
    """`pieces[i]`: the pieces of consumer rank i, in the logical order of its rows."""

    pieces: tuple[tuple[Piece, ...], ...]

    def bytes_moved(self, row_bytes: float) -> float:
        """Returns the bytes that all consumers receive together, if every row has `row_bytes` bytes."""
        return row_bytes * sum(len(piece.rows) for pieces in self.pieces for piece in pieces)


def compute_held_rows(
    collection: Collection, selections: Sequence[RowSelection], num_rows: int, *, times: int = 1
) -> dict[int, RowSelection]:
    """Returns the rows of a call's logical result that each collected rank holds, in its local order.

    The result keeps the order of the call's input where the collected ranks hold each row exactly once, so that a
    permuted (token-balanced) split changes placement, not order. Otherwise (every stage returns all rows) results
    follow one another in collected order.

    Args:
        collection: what the protocol collects.
        selections: the input rows of every rank, as `distribute` returned them.
        num_rows: rows of the call's input.
        times: result rows for each input row.

    Raises:
        BatchError: for selections of other kinds, or of rows that the input does not have.
        ProtocolError: for a collected rank without a selection.
    """
    _check_batch.kind("collection", collection, Collection, "what a protocol collects")
    _check_batch.kind("selections", selections, Sequence, "a RowSelection for each rank")
    _check_batch.count("num_rows", num_rows, least=0)
    _check_batch.count("times", times)
    if max(collection.ranks, default=-1) >= len(selections):
        raise ProtocolError(
            f"the collected ranks {show(collection.ranks)} need a selection each, got {len(selections)}. Pass those of "
            "every rank"
        )
    inputs = {rank: selections[rank] for rank in collection.ranks}
    for rank, rows in inputs.items():
        _check_batch.kind(f"selections[{rank}]", rows, RowSelection, "a RowSelection")
        if rows.end > num_rows:
            raise BatchError(f"selections[{rank}] has row {rows.end - 1}, num_rows={num_rows}. Use rows of the input")
    if _partitions(inputs.values(), num_rows):
        return {rank: rows.repeat(times) for rank, rows in inputs.items()} if times > 1 else inputs
    held, start = {}, 0
    for rank, rows in inputs.items():
        stop = start + len(rows) * times
        held[rank] = RowSelection.range(start, stop)
        start = stop
    return held


def _partitions(selections: Sized[RowSelection], num_rows: int) -> bool:
    """True if the selections hold each of the rows 0 ... num_rows - 1 exactly once.

    That is so if every interval except the first starts where another one stops.
    """
    starts = sorted([start for rows in selections for start, _ in rows.intervals])
    stops = sorted([stop for rows in selections for _, stop in rows.intervals])
    return [*starts, num_rows] == [0, *stops]


def route(held: Mapping[int, RowSelection], wanted: Sequence[RowSelection]) -> Route:
    """Joins producers to consumers: returns for every consumer the pieces of its rows, in its order.

    Args:
        held: for every producer rank the logical rows it holds, in local order; no row twice.
        wanted: for every consumer rank the logical rows it wants, in its order.

    Raises:
        ProtocolError: if a row is held twice, or wanted but not held; for values of other kinds.
    """
    _check_protocol.kind("route: wanted", wanted, Sequence, "a list of RowSelections")
    index = RowIndex(held)
    for rank, rows in enumerate(wanted):
        _check_rows("wanted", rank, rows)
    return Route(tuple([index.find(rows) for rows in wanted]))


class RowIndex:
    """Index of the rank that holds every row, worked out once: finds the pieces of one consumer after another.

    Args:
        held: for every producer rank the logical rows it holds, in local order; no row twice.

    Raises:
        ProtocolError: if a row is held twice; for values of other kinds.
    """

    def __init__(self, held: Mapping[int, RowSelection]) -> None:
        _check_protocol.kind("route: held", held, Mapping, "a mapping of producer ranks to RowSelections")
        for rank, rows in held.items():
            _check_rows("held", rank, rows)
        num_intervals = sum(len(rows.intervals) for rows in held.values())
        num_rows = max((rows.end for rows in held.values()), default=0)
        scattered = num_rows <= 4 * num_intervals
        self._index = _HeldRows(held, num_rows) if scattered else _HeldIntervals(held)

    def find(self, wanted: RowSelection) -> tuple[Piece, ...]:
        """Returns the pieces that make the rows of a consumer, in its order.

        Raises:
            ProtocolError: if a row is held by nobody; for what is not a RowSelection.
        """
        _check_protocol.kind("wanted", wanted, RowSelection, "a RowSelection")
        return tuple(self._index.find(wanted))


def _check_rows(name: str, rank: object, rows: object) -> None:
    if not isinstance(rows, RowSelection):
        raise ProtocolError(f"route: {name}[{show(rank)}]={show(rows)}. Use a RowSelection")


class _HeldIntervals:
    """Index of long intervals, sorted by first row: one bisection finds the holder of a row."""

    def __init__(self, held: Mapping[int, RowSelection]) -> None:
        entries: list[tuple[int, int, int, int]] = []
        for producer, rows in held.items():
            local = 0
            for start, stop in rows.intervals:
                entries.append((start, stop, producer, local))
                local += stop - start
        entries.sort()
        for before, after in pairwise(entries):
            if after[0] < before[1]:
                raise ProtocolError(f"row {after[0]} is held twice, by producer ranks {before[2]} and {after[2]}")
        self._entries = entries
        self._starts = [entry[0] for entry in entries]

    def find(self, wanted: RowSelection) -> Iterator[Piece]:
        """Returns the pieces of `wanted`; neighbours from one producer become one piece."""
        entries, starts = self._entries, self._starts
        owner = -1
        taken: list[tuple[int, int]] = []
        for start, stop in wanted.intervals:
            at = bisect_right(starts, start) - 1
            while start < stop:
                if not 0 <= at < len(entries) or not entries[at][0] <= start < entries[at][1]:
                    raise _held_by_none(start)
                low, high, producer, local = entries[at]
                if producer != owner and taken:
                    yield Piece(owner, RowSelection(tuple(taken)))
                    taken = []
                owner = producer
                upto = min(stop, high)
                taken.append((local + start - low, local + upto - low))
                start, at = upto, at + 1
        if taken:
            yield Piece(owner, RowSelection(tuple(taken)))


class _HeldRows:
    """Index of scattered rows: for every row its holder and place, packed into one integer."""

    def __init__(self, held: Mapping[int, RowSelection], num_rows: int) -> None:
        num_held = sum(map(len, held.values()))
        if num_held > num_rows:
            _HeldIntervals(held)  # raises, naming a row that is held twice
        self._producers = list(held)
        self._local_bits = max(map(len, held.values()), default=0).bit_length()
        self._places = places = array("q", [-1]) * num_rows
        self._one_row = _OneRowSelections()
        for number, rows in enumerate(held.values()):
            for place, row in enumerate(rows, number << self._local_bits):
                places[row] = place
        if places.count(-1) != num_rows - num_held:
            _HeldIntervals(held)  # raises as well

    def find(self, wanted: RowSelection) -> Iterator[Piece]:
        """Returns the pieces of `wanted`; neighbours from one producer become one piece."""
        bits, mask = self._local_bits, (1 << self._local_bits) - 1
        places = self._find_places(wanted)
        owners = [place >> bits for place in places]
        producers, one_row = self._producers, self._one_row
        first = 0
        # Most pieces are a single row, so this is all that is done for most rows.
        for last, (owner, after) in enumerate(pairwise([*owners, -1])):
            if owner == after:
                continue
            if first == last:
                yield Piece(producers[owner], one_row[places[last] & mask])
            else:
                rows = [place & mask for place in places[first : last + 1]]
                yield Piece(producers[owner], RowSelection.from_rows(rows))
            first = last + 1

    def _find_places(self, wanted: RowSelection) -> list[int]:
        places, num_rows = self._places, len(self._places)
        if wanted.end > num_rows:
            raise _held_by_none(next(max(start, num_rows) for start, stop in wanted.intervals if stop > num_rows))
        found = [places[row] for row in wanted]
        if -1 in found:
            raise _held_by_none([*wanted][found.index(-1)])
        return found


class _OneRowSelections(dict[int, RowSelection]):
    """The selection of a single row, made once for all pieces that consist of it."""

    def __missing__(self, row: int) -> RowSelection:
        self[row] = RowSelection.range(row, row + 1)
        return self[row]


def _held_by_none(row: int) -> ProtocolError:
    return ProtocolError(f"row {row} is wanted by a consumer and held by no producer")
