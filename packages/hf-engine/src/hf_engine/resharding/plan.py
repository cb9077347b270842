"""Planning a reshard: exact box arithmetic for any pair of layouts. Pure, needs no process group and no GPU.

The paper's transition (section 5.3, Table 2) is the special case in which every rank's source boxes lie inside its
target boxes: then the messages of one micro-DP group are one all-gather and nothing is received twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
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
        received: dict[int, int] = dict.fromkeys(self.ranks, 0)
        for message in self.messages:
            for rank in message.destinations:
                received[rank] += self._bytes_of(message.box)
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


def plan_reshard(source: WeightLayout, target: WeightLayout) -> ReshardPlan:
    """Plans the transfer between any two layouts, on the same, overlapping or disjoint ranks.

    Every target element that a rank's own source holds is kept; every other one is received exactly once, from the
    holder that has the fewest bytes to send so far (the lowest rank among equals). The plan is deterministic.

    Raises:
        ReshardError: if the two layouts differ in names or shapes, or the source holds a needed element nowhere.
    """
    _check_same_parameters(source, target)
    balance = _SendBalance()
    messages: list[Message] = []
    kept: dict[int, list[tuple[str, Box]]] = defaultdict(list)
    for name in target.shapes:
        holders = _ranks_by_box(source, name)
        for box, needing in _ranks_by_box(target, name).items():
            for cell, owners in _cells(name, box, holders):
                lacking = [rank for rank in needing if rank not in owners]
                for rank in needing:
                    if rank in owners:
                        kept[rank].append((name, cell))
                messages.extend(
                    Message(source=sender, destinations=destinations, name=name, box=cell)
                    for sender, destinations in balance.assign(cell, sorted(owners), lacking)
                )
    return ReshardPlan(
        source=source,
        target=target,
        messages=tuple(messages),
        kept={rank: tuple(pieces) for rank, pieces in kept.items()},
    )


class _SendBalance:
    """Chooses senders so that the bytes sent stay level."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = defaultdict(int)

    def assign(self, cell: Box, owners: list[int], lacking: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        by_sender: dict[int, list[int]] = defaultdict(list)
        for rank in lacking:
            sender = min(owners, key=lambda owner: (self._sent[owner], owner))
            self._sent[sender] += cell.numel
            by_sender[sender].append(rank)
        for sender, destinations in sorted(by_sender.items()):
            yield sender, tuple(destinations)


def _cells(name: str, box: Box, holders: Mapping[Box, list[int]]) -> Iterator[tuple[Box, frozenset[int]]]:
    """Cuts a wanted box into pieces with their owners: each piece lies in one box of every rank that owns it."""
    covers = list(holders)
    for cell, indices in partition_box(box, covers):
        if not indices:
            raise ReshardError(f"no rank of the source holds {name!r} at {cell}; the source layout is incomplete")
        yield cell, frozenset(rank for index in indices for rank in holders[covers[index]])


def _ranks_by_box(layout: WeightLayout, name: str) -> dict[Box, list[int]]:
    ranks: dict[Box, list[int]] = defaultdict(list)
    for rank in layout.ranks:
        for box in layout.boxes_of(rank).get(name, ()):
            if box.numel:
                ranks[box].append(rank)
    return ranks


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
