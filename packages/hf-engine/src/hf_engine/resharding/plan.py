"""Planning a reshard: exact box arithmetic for any pair of layouts. Pure, needs no process group and no GPU.

The paper's transition (section 5.3, Table 2) is the special case in which every rank's source boxes lie inside its
target boxes: then the messages of one micro-DP group are one all-gather and nothing is received twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_engine.resharding.boxes import Box, partition_box
from hf_engine.resharding.layouts import WeightLayout
from hf_protocols.errors import ReshardError

__all__ = ["Message", "ReshardPlan", "plan_reshard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One piece of one parameter that `source` sends to every rank in `destinations`."""

    source: int
    destinations: tuple[int, ...]
    name: str
    box: Box

    @property
    def participants(self) -> frozenset[int]:
        """The sender and the receivers."""
        return frozenset((self.source, *self.destinations))


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """What every rank keeps, sends and receives to go from one layout to another.

    All byte counts are in the target's dtype: a source of another dtype is cast before it is sent.
    """

    source: WeightLayout
    target: WeightLayout
    messages: tuple[Message, ...]
    """In the order of names; every element that a rank lacks is in exactly one message to it."""
    kept: Mapping[int, tuple[tuple[str, Box], ...]]
    """By rank: the pieces of its target that it already holds."""

    @cached_property
    def recv_bytes(self) -> Mapping[int, int]:
        """By rank: bytes received from other ranks."""
        # Messages share their tuples of receivers, which are long where many ranks want the same.
        alike: dict[int, tuple[tuple[int, ...], int]] = {}
        for message in self.messages:
            key = id(message.destinations)
            alike[key] = (message.destinations, alike.get(key, ((), 0))[1] + message.box.numel)
        received: dict[int, int] = dict.fromkeys(self.ranks, 0)
        for destinations, numel in alike.values():
            for rank in destinations:
                received[rank] += numel * self.target.element_bytes
        return received

    @cached_property
    def send_bytes(self) -> Mapping[int, int]:
        """By rank: bytes sent, counted once for every receiver."""
        sent: dict[int, int] = dict.fromkeys(self.ranks, 0)
        for message in self.messages:
            sent[message.source] += self._bytes_of(message.box) * len(message.destinations)
        return sent

    @cached_property
    def kept_bytes(self) -> Mapping[int, int]:
        """By rank: bytes of the target that the rank's own source holds already."""
        return {rank: sum(self._bytes_of(box) for _, box in self.kept.get(rank, ())) for rank in self.ranks}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of either layout, ascending."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    def _bytes_of(self, box: Box) -> int:
        return box.numel * self.target.element_bytes


def plan_reshard(
    source: WeightLayout, target: WeightLayout, *, near: Sequence[Collection[Sequence[int]]] = ()
) -> ReshardPlan:
    """Plans the transfer between any two layouts, on the same, overlapping or disjoint ranks.

    Every target element that a rank's own source holds is kept; every other one is received exactly once, from a
    holder that is as near as any, and among equally near ones from the one that has the fewest bytes to send so far
    (the lowest rank among equals). The plan is deterministic.

    Args:
        source: where the weights are.
        target: where they are wanted.
        near: groupings of ranks, the nearest first, such as `[topology.groups("micro_dp"), machines]`: a holder in
            the receiver's group of an earlier grouping is nearer than any other.

    Raises:
        ReshardError: if the two layouts differ in names or shapes, or the source holds a needed element nowhere.
    """
    _check_same_parameters(source, target)
    senders = _Senders(near)
    holders_of, needing_of = _BoxRanks(source), _BoxRanks(target)
    cells_of: dict[object, list[_Cell]] = {}
    messages: list[Message] = []
    kept: dict[int, list[tuple[str, Box]]] = defaultdict(list)
    for name in target.shapes:
        # Layers of one pipeline stage differ in name only.
        pattern = (holders_of[name], needing_of[name])
        if pattern not in cells_of:
            cells_of[pattern] = list(_cells(name, *pattern))
        for cell in cells_of[pattern]:
            for rank in cell.keeping:
                kept[rank].append((name, cell.box))
            messages.extend(
                Message(source=sender, destinations=destinations, name=name, box=cell.box)
                for sender, destinations in senders.assign(cell)
            )
    return ReshardPlan(
        source=source,
        target=target,
        messages=tuple(messages),
        kept={rank: tuple(pieces) for rank, pieces in kept.items()},
    )


_Pattern = tuple[tuple[Box, tuple[int, ...]], ...]
"""Every box of one parameter with the ranks that hold it, or want it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cell:
    """A piece of a wanted box that each of its owners holds whole; one object for all parameters of a pattern."""

    box: Box
    owners: tuple[int, ...]
    lacking: tuple[int, ...]
    keeping: tuple[int, ...]


class _BoxRanks:
    """Looks up a layout by name: which boxes, on which ranks. Ranks that share one mapping are read once."""

    def __init__(self, layout: WeightLayout) -> None:
        sharing: dict[int, list[int]] = defaultdict(list)
        for rank in layout.ranks:
            sharing[id(layout.boxes_of(rank))].append(rank)
        self._held = [(layout.boxes_of(ranks[0]), ranks) for ranks in sharing.values()]

    def __getitem__(self, name: str) -> _Pattern:
        found: dict[Box, list[int]] = defaultdict(list)
        for boxes, ranks in self._held:
            for box in boxes.get(name, ()):
                if box.numel:
                    found[box] += ranks
        return tuple((box, tuple(sorted(ranks))) for box, ranks in found.items())


class _Senders:
    """Chooses the nearest senders so that the bytes sent stay level."""

    def __init__(self, near: Sequence[Collection[Sequence[int]]]) -> None:
        self._group_of = [{rank: index for index, group in enumerate(groups) for rank in group} for groups in near]
        self._sent: dict[int, int] = defaultdict(int)
        self._candidates: dict[_Cell, list[tuple[int, ...]]] = {}
        self._settled: dict[_Cell, list[tuple[int, tuple[int, ...]]]] = {}

    def assign(self, cell: _Cell) -> list[tuple[int, tuple[int, ...]]]:
        """Every sender of the cell with the ranks that it serves."""
        if cell in self._settled:
            assigned = self._settled[cell]
        else:
            if cell not in self._candidates:
                self._candidates[cell] = [self._nearest_to(rank, cell.owners) for rank in cell.lacking]
            assigned = self._choose(cell)
            if all(len(owners) == 1 for owners in self._candidates[cell]):
                self._settled[cell] = assigned
        for sender, destinations in assigned:
            self._sent[sender] += cell.box.numel * len(destinations)
        return assigned

    def _choose(self, cell: _Cell) -> list[tuple[int, tuple[int, ...]]]:
        by_sender: dict[int, list[int]] = defaultdict(list)
        sent = {owner: self._sent[owner] for owner in cell.owners}
        for rank, owners in zip(cell.lacking, self._candidates[cell], strict=True):
            sender = owners[0] if len(owners) == 1 else min(owners, key=sent.__getitem__)
            sent[sender] += cell.box.numel
            by_sender[sender].append(rank)
        return [(sender, tuple(by_sender[sender])) for sender in sorted(by_sender)]

    def _nearest_to(self, rank: int, owners: tuple[int, ...]) -> tuple[int, ...]:
        if len(owners) == 1:
            return owners
        for group_of in self._group_of:
            inside = tuple(owner for owner in owners if rank in group_of and group_of.get(owner) == group_of[rank])
            if inside:
                return inside
        return owners


def _cells(name: str, holders: _Pattern, needing: _Pattern) -> Iterator[_Cell]:
    """Cuts every wanted box into pieces: each lies in one box of every rank that owns it."""
    covers = [box for box, _ in holders]
    for box, ranks in needing:
        for cell, indices in partition_box(box, covers):
            if not indices:
                raise ReshardError(f"no rank of the source holds {name!r} at {cell}; the source layout is incomplete")
            owners = {rank for index in indices for rank in holders[index][1]}
            yield _Cell(
                box=cell,
                owners=tuple(sorted(owners)),
                lacking=tuple(rank for rank in ranks if rank not in owners),
                keeping=tuple(rank for rank in ranks if rank in owners),
            )


def _check_same_parameters(source: WeightLayout, target: WeightLayout) -> None:
    problems = []
    if missing := sorted(target.shapes.keys() - source.shapes.keys()):
        problems.append(f"the source lacks {missing}")
    if extra := sorted(source.shapes.keys() - target.shapes.keys()):
        problems.append(f"the target has no place for {extra}")
    differing = [n for n in target.shapes if n in source.shapes and tuple(source.shapes[n]) != tuple(target.shapes[n])]
    problems += [f"{n!r} is {source.shapes[n]} in the source, {target.shapes[n]} in the target" for n in differing]
    if problems:
        raise ReshardError(f"the two layouts are not of one model: {'; '.join(problems)}")
