"""The rounds of a plan as one rank runs them: which regions are packed where, and the collective in between.

Every message ends in a checksum of eight bytes. It says what the bytes before it are a copy of, and of which version of
the weights; where transfers are verified it is a digest of these bytes, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.digest import digest_words
from hf_engine.resharding.plan import Message
from hf_engine.resharding.rounds import GatherRound, PeerRound

__all__ = [
    "CHECKSUM_BYTES",
    "Checksums",
    "Region",
    "RegionViews",
    "Step",
    "build_step",
    "gathers_by_messages",
    "locate",
]

CHECKSUM_BYTES = 8
"""Bytes of a message's checksum."""

_Boxes = Mapping[str, tuple[Box, ...]]
_Tensors = Mapping[str, Sequence[torch.Tensor]]


class Region(NamedTuple):
    """A part of one of this rank's tensors."""

    name: str
    part: int
    slices: tuple[slice, ...]


class RegionViews:
    """Keeps the views of a rank's tensors at their regions: cutting one takes longer than copying a small tensor.

    Keeps the tensors alive, too. A view is cut while its tensor has memory, and stays valid after the storage was empty
    for a while.
    """

    def __init__(self, tensors: _Tensors) -> None:
        self._tensors = tensors
        self._views: dict[int, tuple[Region, torch.Tensor]] = {}

    def at(self, region: Region) -> torch.Tensor:
        """The view of that part."""
        found = self._views.get(id(region))
        if found is None:
            view = self._tensors[region.name][region.part][region.slices]
            found = self._views[id(region)] = region, view  # the region, too, so that no other gets its id
        return found[1]


def locate(boxes: _Boxes, name: str, box: Box) -> Region:
    """Finds the one box of a rank that contains `box`."""
    part, container = next((i, candidate) for i, candidate in enumerate(boxes[name]) if candidate.contains(box))
    return Region(name, part, box.slices_in(container))


def gathers_by_messages(incoming: torch.Tensor) -> bool:
    """Returns True if an all-gather into this buffer goes as one message from each member to each other.

    So it does on the host: gloo's own collective gathers into memory that it allocates in every call, and copies from
    there. Messages arrive where they belong.
    """
    return incoming.is_cpu


class _Span(NamedTuple):
    """One message in a flat buffer: `stop - start` bytes, then the checksum at `checksum`."""

    peers: tuple[int, ...]
    """Positions in the group: of all receivers of what goes out, of the one sender of what comes in."""
    start: int
    stop: int
    checksum: int
    identity: int
    """Says which boxes of which parameters these bytes are; equal on both sides, never 0."""

    @property
    def end(self) -> int:
        return self.checksum + CHECKSUM_BYTES

    def compute_checksum(self, buffer: torch.Tensor, version: int, *, verifies: bool) -> torch.Tensor:
        """Checksum [1] of the message in `buffer`: other boxes, and another version, have another."""
        number = _wrap(self.identity + 31 * version)
        expected = torch.full((1,), number, dtype=torch.int64, device=buffer.device)
        return expected + digest_words(buffer[self.start : self.stop]) if verifies else expected


class _Piece(NamedTuple):
    """Bytes of a flat buffer and the region that is copied from or to there."""

    start: int
    stop: int
    region: Region


class _Pieces:
    """Regions and their places in a flat buffer; the views of the places are kept until another buffer comes."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._pieces = pieces
        self._buffer: torch.Tensor | None = None
        self._places: list[torch.Tensor] = []

    @property
    def names(self) -> set[str]:
        return {piece.region.name for piece in self._pieces}

    def pair(
        self, buffer: torch.Tensor, dtype: torch.dtype, views: RegionViews
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Places in the buffer, as tensors of that dtype, each with the view of its region."""
        parts = [views.at(piece.region) for piece in self._pieces]
        if self._buffer is not buffer:
            self._buffer = buffer
            with torch.inference_mode(False):  # a view of another dtype that is made in that mode belongs to it
                self._places = [
                    buffer[piece.start : piece.stop].view(dtype).view(part.shape)
                    for piece, part in zip(self._pieces, parts, strict=True)
                ]
        return zip(self._places, parts, strict=True)


class Checksums:
    """Compares what arrived with what was sent, all at once at the end, so that no device waits in between.

    Args:
        version: of the weights, the same on all ranks.
        verifies: whether checksums are digests of the bytes, too.
    """

    def __init__(self, version: int, *, verifies: bool) -> None:
        self._version, self._verifies = version, verifies
        self._received: list[torch.Tensor] = []
        self._found: list[torch.Tensor] = []
        self._peers: list[int] = []

    def write(self, outgoing: torch.Tensor, span: _Span) -> None:
        """Ends a message in its checksum."""
        checksum = span.compute_checksum(outgoing, self._version, verifies=self._verifies)
        outgoing[span.checksum : span.end].view(torch.int64).copy_(checksum)

    def add(self, incoming: torch.Tensor, span: _Span) -> None:
        """Notes the checksum of a message and that of what came with it, and clears it.

        Buffers are used again: should the next message not arrive, this one must not pass for it.
        """
        checksum = incoming[span.checksum : span.end].view(torch.int64)
        self._received.append(checksum.clone())
        self._found.append(span.compute_checksum(incoming, self._version, verifies=self._verifies))
        self._peers.append(span.peers[0])
        checksum.zero_()

    @property
    def count(self) -> int:
        """Messages received."""
        return len(self._peers)

    def damaged(self) -> list[int]:
        """Peers (positions in the group) of whose messages a checksum differs."""
        if not self._peers:
            return []
        differ = torch.cat(self._received) != torch.cat(self._found)
        return sorted({peer for peer, wrong in zip(self._peers, differ.tolist(), strict=True) if wrong})


class Step:
    """One round on one rank: pack, communicate, unpack.

    Args:
        outgoing: one span for all receivers of the same pieces; one for all members in an all-gather.
        incoming: one span per message received.
        packed: regions of this rank's source tensors.
        unpacked: regions of this rank's target tensors.
        is_gather: one all-gather of the group instead of point-to-point messages.
    """

    def __init__(
        self,
        *,
        outgoing: Sequence[_Span],
        incoming: Sequence[_Span],
        packed: Sequence[_Piece],
        unpacked: Sequence[_Piece],
        is_gather: bool,
        gather_size: int = 1,
    ) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._packed, self._unpacked = _Pieces(packed), _Pieces(unpacked)
        self._is_gather = is_gather
        self.send_bytes = max((span.end for span in outgoing), default=0)
        self.recv_bytes = (
            self.send_bytes * gather_size if is_gather else max((span.end for span in incoming), default=0)
        )
        self.payload_bytes = sum(span.stop - span.start for span in incoming)

    @property
    def packed_names(self) -> set[str]:
        """Source parameters that this step sends."""
        return self._packed.names

    @property
    def unpacked_names(self) -> set[str]:
        """Target parameters that this step writes."""
        return self._unpacked.names

    def pack(self, held: RegionViews, outgoing: torch.Tensor, dtype: torch.dtype, checksums: Checksums) -> None:
        """Copies this rank's pieces into the buffer, cast to `dtype`, and checksums every message."""
        for place, view in self._packed.pair(outgoing, dtype, held):
            place.copy_(view)
        for span in self._outgoing:
            checksums.write(outgoing, span)

    def start(self, outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup | None) -> list[dist.Work]:
        """Starts the communication; the buffers must not be touched until `finish`."""
        if self._is_gather and not gathers_by_messages(incoming):
            work = dist.all_gather_single(
                incoming[: self.recv_bytes], outgoing[: self.send_bytes], group=group, async_op=True
            )
            return [work]
        ways = ((dist.isend, outgoing, self._outgoing), (dist.irecv, incoming, self._incoming))
        operations = [
            dist.P2POp(way, buffer[span.start : span.end], group=group, group_peer=peer)
            for way, buffer, spans in ways
            for span in spans
            for peer in span.peers
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def unpack(self, incoming: torch.Tensor, wanted: RegionViews, dtype: torch.dtype, checksums: Checksums) -> None:
        """Copies what arrived into this rank's target tensors."""
        for span in self._incoming:
            checksums.add(incoming, span)
        for place, view in self._unpacked.pair(incoming, dtype, wanted):
            view.copy_(place)


def build_step(
    round_: GatherRound | PeerRound, members: Sequence[int], rank: int, held: _Boxes, wanted: _Boxes, item_bytes: int
) -> Step:
    """Lays one round out in this rank's buffers: what several ranks receive alike is packed once, with one checksum."""
    if isinstance(round_, GatherRound):
        return _gather_step(round_, members, rank, held, wanted, item_bytes)
    # Between two ranks spans go in the order of the plan's messages, which both know.
    outgoing: dict[tuple[int, ...], list[Message]] = defaultdict(list)
    incoming: dict[tuple[int, tuple[int, ...]], list[Message]] = defaultdict(list)
    for message in round_.messages:
        if message.source == rank:
            outgoing[message.destinations].append(message)
        elif rank in message.destinations:
            incoming[message.source, message.destinations].append(message)
    packed, sent = _lay_out(
        [(tuple(map(members.index, to)), messages) for to, messages in outgoing.items()], held, item_bytes
    )
    unpacked, received = _lay_out(
        [((members.index(source),), messages) for (source, _), messages in incoming.items()], wanted, item_bytes
    )
    return Step(outgoing=sent, incoming=received, packed=packed, unpacked=unpacked, is_gather=False)


def _gather_step(
    round_: GatherRound, members: Sequence[int], rank: int, held: _Boxes, wanted: _Boxes, item_bytes: int
) -> Step:
    """Shares lie one after the other in the incoming buffer, in member order."""
    own = members.index(rank)
    others = tuple(peer for peer in range(len(members)) if peer != own)
    contents = [[(slot.names[i], slot.boxes[i]) for slot in round_.slots] for i in range(len(members))]
    share = _span(others, 0, round_.share_numel * item_bytes, contents[own])
    packed, unpacked = [], []
    position = 0
    for slot in round_.slots:
        stop = position + slot.boxes[own].numel * item_bytes
        packed.append(_Piece(position, stop, locate(held, slot.names[own], slot.boxes[own])))
        for index, (name, box) in enumerate(zip(slot.names, slot.boxes, strict=True)):
            if index != own:
                base = index * share.end
                unpacked.append(_Piece(base + position, base + stop, locate(wanted, name, box)))
        position = stop
    incoming = [_span((peer,), peer * share.end, share.stop, contents[peer]) for peer in others]
    return Step(
        outgoing=[share],
        incoming=incoming,
        packed=packed,
        unpacked=unpacked,
        is_gather=True,
        gather_size=len(members),
    )


def _lay_out(
    by_peers: Iterable[tuple[tuple[int, ...], Sequence[Message]]], boxes: _Boxes, item_bytes: int
) -> tuple[list[_Piece], list[_Span]]:
    """Places the pieces for, or from, the same peers behind each other in one flat buffer, followed by a checksum."""
    pieces: list[_Piece] = []
    spans: list[_Span] = []
    position = 0
    for peers, messages in by_peers:
        first = position
        for message in messages:
            stop = position + message.box.numel * item_bytes
            pieces.append(_Piece(position, stop, locate(boxes, message.name, message.box)))
            position = stop
        spans.append(_span(peers, first, position - first, [(m.name, m.box) for m in messages]))
        position = spans[-1].end
    return pieces, spans


def _span(peers: tuple[int, ...], start: int, num_bytes: int, content: Iterable[tuple[str, Box]]) -> _Span:
    """Payloads start, and checksums lie, at multiples of eight bytes."""
    return _Span(peers, start, start + num_bytes, start + -(-num_bytes // 8) * 8, _identify(content))


def _wrap(number: int) -> int:
    """A number of 64 bits with a sign, as torch adds them."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _identify(content: Iterable[tuple[str, Box]]) -> int:
    """Number of 64 bits for the pieces of a message, the same in every process; odd, so never 0."""
    text = repr([(name, tuple(box.offset), tuple(box.shape)) for name, box in content])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True) | 1
