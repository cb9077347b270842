"""Planning a reshard: exact box arithmetic for any pair of layouts. Pure, needs no process group and no GPU.

The paper's transition (section 5.3, Table 2) is the special case in which every rank's source boxes lie inside its
target boxes: then the messages of one micro-DP group are one all-gather and nothing is received twice.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hf_engine.resharding.boxes import Box, partition_box
from hf_engine.resharding.layouts import BoxNumbers, WeightLayout
from hf_protocols.errors import ReshardError
from hf_protocols.validation import Checks, show

__all__ = ["KeptPiece", "Message", "PieceTransfer", "ReshardPlan", "plan_reshard"]

_check = Checks(ReshardError)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTransfer:
    """The messages of parameters that are cut alike: one piece of each, at the same place."""

    source: int
    destinations: tuple[int, ...]
    names: tuple[str, ...]
    box: Box

    @property
    def numel(self) -> int:
        """Elements that each receiver gets."""
        return self.box.numel * len(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPiece:
    """Pieces that ranks hold already, of parameters that are sharded alike: one of each, at the same place."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    box: Box


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """Weights that every rank keeps, sends and receives to go from one layout to another.

    All byte counts are in the target's dtype: a source of another dtype is cast before it is sent. Layers that are
    sharded alike are planned once, so that the figures for a thousand ranks take seconds to compute; `messages` and
    `kept` list every piece.
    """

    source: WeightLayout
    target: WeightLayout
    transfers: tuple[PieceTransfer, ...]
    """Every element that a rank lacks is in exactly one transfer to it."""
    kept_pieces: tuple[KeptPiece, ...]
    """Every element that a rank needs and holds is in exactly one of them."""

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """One by one, in the order of names."""
        by_name: dict[str, list[Message]] = {name: [] for name in self.target.shapes}
        for transfer in self.transfers:
            for name in transfer.names:
                by_name[name].append(
                    Message(source=transfer.source, destinations=transfer.destinations, name=name, box=transfer.box)
                )
        return tuple(message for messages in by_name.values() for message in messages)

    @cached_property
    def kept(self) -> Mapping[int, tuple[tuple[str, Box], ...]]:
        """By rank: the pieces of its target that it already holds, in the order of names."""
        by_name: dict[str, list[KeptPiece]] = {name: [] for name in self.target.shapes}
        for piece in self.kept_pieces:
            for name in piece.names:
                by_name[name].append(piece)
        kept: dict[int, list[tuple[str, Box]]] = defaultdict(list)
        for name, kept_pieces in by_name.items():
            for piece in kept_pieces:
                for rank in piece.ranks:
                    kept[rank].append((name, piece.box))
        return {rank: tuple(pieces) for rank, pieces in kept.items()}

    def select(self, names: Collection[str]) -> ReshardPlan:
        """The same for some of the parameters: same senders, same pieces."""
        source, target = self.source.select(names), self.target.select(names)
        wanted = frozenset(names)
        return ReshardPlan(
            source=source,
            target=target,
            transfers=tuple(
                replace(transfer, names=chosen)
                for transfer in self.transfers
                if (chosen := tuple(name for name in transfer.names if name in wanted))
            ),
            kept_pieces=tuple(
                replace(piece, names=chosen)
                for piece in self.kept_pieces
                if (chosen := tuple(name for name in piece.names if name in wanted))
            ),
        )

    @cached_property
    def recv_bytes(self) -> Mapping[int, int]:
        """By rank: bytes received from other ranks."""
        # Transfers share their tuples of receivers, which are long where many ranks want the same.
        alike: dict[int, tuple[tuple[int, ...], int]] = {}
        for transfer in self.transfers:
            key = id(transfer.destinations)
            alike[key] = (transfer.destinations, alike.get(key, ((), 0))[1] + transfer.numel)
        received: dict[int, int] = dict.fromkeys(self.ranks, 0)
        for destinations, numel in alike.values():
            for rank in destinations:
                received[rank] += numel * self.target.element_bytes
        return received

    @cached_property
    def send_bytes(self) -> Mapping[int, int]:
        """By rank: bytes sent, counted once for every receiver."""
        sent: dict[int, int] = dict.fromkeys(self.ranks, 0)
        for transfer in self.transfers:
            sent[transfer.source] += transfer.numel * self.target.element_bytes * len(transfer.destinations)
        return sent

    @cached_property
    def kept_bytes(self) -> Mapping[int, int]:
        """By rank: bytes of the target that the rank's own source holds already."""
        kept: dict[int, int] = dict.fromkeys(self.ranks, 0)
        for piece in self.kept_pieces:
            num_bytes = piece.box.numel * len(piece.names) * self.target.element_bytes
            for rank in piece.ranks:
                kept[rank] += num_bytes
        return kept

    @cached_property
    def digest(self) -> int:
        """32 bits of dtypes, pieces and who sends them to whom: equal on ranks that were given the same plan."""
        digest = zlib.crc32(repr((self.source.dtype, self.target.dtype)).encode())
        for transfer in self.transfers:
            digest = zlib.crc32(repr((transfer.source, transfer.destinations)).encode(), digest)
        pieces: Sequence[PieceTransfer | KeptPiece] = (*self.transfers, *self.kept_pieces)
        for piece in pieces:
            digest = zlib.crc32(repr((piece.names, piece.box.offset, piece.box.shape)).encode(), digest)
        return digest

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of either layout, ascending."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))


def plan_reshard(
    source: WeightLayout, target: WeightLayout, *, near: Sequence[Collection[Sequence[int]]] = ()
) -> ReshardPlan:
    """Plans the transfer between any two layouts, on the same, overlapping or disjoint ranks.

    Every target element that a rank's own source holds is kept. Every other element is received exactly once, from the
    nearest holder. Among equally near holders this is the one with the fewest bytes to send so far, and among those the
    lowest rank. The plan is deterministic.

    Args:
        source: where the weights are.
        target: where they are wanted.
        near: groupings of ranks, the nearest first, such as `[topology.groups("micro_dp"), machines]`: a holder in
            the receiver's group of an earlier grouping is nearer than any other.

    Raises:
        ReshardError: if the two layouts differ in names or shapes, or the source holds a needed element nowhere.
    """
    for name, layout in (("source", source), ("target", target)):
        _check.kind(name, layout, WeightLayout, "a WeightLayout, such as a backend's weight_layout()")
    _check_same_parameters(source, target)
    senders = _Senders(near)
    holders_of, needing_of = _BoxRanks(source), _BoxRanks(target)
    alike: dict[object, list[str]] = defaultdict(list)
    for name in target.shapes:
        # Layers of one pipeline stage differ in name only.
        alike[holders_of.pattern_key(name), needing_of.pattern_key(name)].append(name)
    transfers: list[PieceTransfer] = []
    kept_pieces: list[KeptPiece] = []
    for names in alike.values():
        for cell in _cells(names[0], holders_of[names[0]], needing_of[names[0]]):
            if cell.keeping:
                kept_pieces.append(KeptPiece(ranks=cell.keeping, names=tuple(names), box=cell.box))
            transfers += senders.send(cell, tuple(names))
    return ReshardPlan(source=source, target=target, transfers=tuple(transfers), kept_pieces=tuple(kept_pieces))


_Pattern = tuple[tuple[Box, tuple[int, ...]], ...]
"""Every box of one parameter with the ranks that hold it, or want it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A piece of a wanted box that each of its owners holds whole."""

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
        keys: dict[str, list[object]] = defaultdict(list)
        numbers = BoxNumbers()
        for index, (held, _) in enumerate(self._held):
            for name, boxes in held.items():
                keys[name] += (index, numbers.of(boxes))
        self._keys = {name: tuple(key) for name, key in keys.items()}

    def pattern_key(self, name: str) -> object:
        """Equal for parameters whose boxes lie on the same ranks."""
        return self._keys.get(name, ())

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
        self._group_of = _numbered(near)
        self._sent: dict[int, int] = defaultdict(int)

    def send(self, cell: _Cell, names: tuple[str, ...]) -> Iterator[PieceTransfer]:
        """The cell of every name from its senders to the ranks that lack it."""
        candidates = (
            [cell.owners] if len(cell.owners) == 1 else [self._nearest_to(rank, cell.owners) for rank in cell.lacking]
        )
        if all(len(owners) == 1 for owners in candidates):
            # Nothing to choose: what holds for one name holds for all.
            yield from self._send(cell, names, self._choose(cell, candidates))
            return
        for name in names:
            yield from self._send(cell, (name,), self._choose(cell, candidates))

    def _send(
        self, cell: _Cell, names: tuple[str, ...], assigned: Sequence[tuple[int, tuple[int, ...]]]
    ) -> Iterator[PieceTransfer]:
        for sender, destinations in assigned:
            self._sent[sender] += cell.box.numel * len(names) * len(destinations)
            yield PieceTransfer(source=sender, destinations=destinations, names=names, box=cell.box)

    def _choose(self, cell: _Cell, candidates: Sequence[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
        if len(cell.owners) == 1:
            return [(cell.owners[0], cell.lacking)] if cell.lacking else []
        by_sender: dict[int, list[int]] = defaultdict(list)
        sent = {owner: self._sent[owner] for owner in cell.owners}
        for rank, owners in zip(cell.lacking, candidates, strict=True):
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


def _numbered(near: Sequence[Collection[Sequence[int]]]) -> list[dict[int, int]]:
    """By grouping: the number of every rank's group."""
    try:
        found = [{rank: index for index, group in enumerate(groups) for rank in group} for groups in near]
        is_of_ranks = all(type(rank) is int and rank >= 0 for group_of in found for rank in group_of)
    except TypeError:
        is_of_ranks = False
    if not is_of_ranks:
        raise ReshardError(f"near={show(near)}. Use groupings of ranks, such as [[[0, 1], [2, 3]]]")
    return found


def _cells(name: str, holders: _Pattern, needing: _Pattern) -> Iterator[_Cell]:
    """Cuts every wanted box into pieces: each lies in one box of every rank that owns it."""
    covers = [box for box, _ in holders]
    # Long where a thousand ranks want the same: cells with the same owners share them.
    split: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for box, ranks in needing:
        split.clear()
        for cell, indices in partition_box(box, covers):
            if not indices:
                raise ReshardError(
                    f"no rank of the source holds {show(name)} at {cell}; the source layout is incomplete"
                )
            owners = tuple(sorted({rank for index in indices for rank in holders[index][1]}))
            if owners not in split:
                split[owners] = _split(ranks, frozenset(owners))
            lacking, keeping = split[owners]
            yield _Cell(box=cell, owners=owners, lacking=lacking, keeping=keeping)


def _split(ranks: tuple[int, ...], owners: frozenset[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those that lack something, and those that own it."""
    return tuple(rank for rank in ranks if rank not in owners), tuple(rank for rank in ranks if rank in owners)


def _check_same_parameters(source: WeightLayout, target: WeightLayout) -> None:
    problems = []
    if missing := sorted(target.shapes.keys() - source.shapes.keys()):
        problems.append(f"the source lacks {_some(missing)}")
    if extra := sorted(source.shapes.keys() - target.shapes.keys()):
        problems.append(f"the target has no place for {_some(extra)}")
    differing = [n for n in target.shapes if n in source.shapes and tuple(source.shapes[n]) != tuple(target.shapes[n])]
    if differing:
        first = differing[0]
        shapes = f"{show(first)} is {source.shapes[first]} in the source, {target.shapes[first]} in the target"
        problems.append(shapes + _more(len(differing) - 1))
    if problems:
        raise ReshardError(
            f"the two layouts, of {len(source.shapes)} and {len(target.shapes)} parameters, are not of one model: "
            f"{'; '.join(problems)}. Give both sides the same model, and its names in the Hugging Face files"
        )


def _some(names: Sequence[str]) -> str:
    return f"{list(names[:2])}{_more(len(names) - 2)}"


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
