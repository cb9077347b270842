"""The rounds of a plan as one rank runs them: which regions are packed where, and the collective in between.

Every message ends in a seal of 16 bytes: the digest of its bytes and the version of the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.digest import digest_words
from hf_engine.resharding.plan import Message
from hf_engine.resharding.rounds import GatherRound, PeerRound

__all__ = ["SEAL_BYTES", "Region", "Seals", "Step", "build_step", "gathers_by_messages", "locate"]

SEAL_BYTES = 16
"""Bytes of a message's seal: digest and version, 64 bits each."""

_Boxes = Mapping[str, tuple[Box, ...]]
_Tensors = Mapping[str, Sequence[torch.Tensor]]


class Region(NamedTuple):
    """A part of one of this rank's tensors."""

    name: str
    part: int
    slices: tuple[slice, ...]

    def of(self, tensors: _Tensors) -> torch.Tensor:
        """The view of that part."""
        return tensors[self.name][self.part][self.slices]


def locate(boxes: _Boxes, name: str, box: Box) -> Region:
    """Finds the one box of a rank that contains `box`."""
    part, container = next((i, candidate) for i, candidate in enumerate(boxes[name]) if candidate.contains(box))
    return Region(name, part, box.slices_in(container))


def gathers_by_messages(incoming: torch.Tensor) -> bool:
    """Whether an all-gather into this buffer goes as one message from each member to each other.

    So it does on the host: gloo's own collective gathers into memory that it allocates in every call, and copies from
    there. Messages arrive where they belong.
    """
    return incoming.is_cpu


class _Span(NamedTuple):
    """One message in a flat buffer: `stop - start` bytes, then the seal at `seal`."""

    peer: int
    start: int
    stop: int
    seal: int

    @property
    def end(self) -> int:
        return self.seal + SEAL_BYTES


class _Piece(NamedTuple):
    """Bytes of a flat buffer and the region that is copied from or to there."""

    start: int
    stop: int
    region: Region


class Seals:
    """Compares what arrived with what was sent, all at once at the end, so that no device waits in between."""

    def __init__(self) -> None:
        self._sealed: list[torch.Tensor] = []
        self._found: list[torch.Tensor] = []
        self._peers: list[int] = []

    def add(self, incoming: torch.Tensor, span: _Span) -> None:
        """Notes the seal of a message and the digest of the bytes that came with it."""
        self._sealed.append(incoming[span.seal : span.end].view(torch.int64).clone())
        self._found.append(digest_words(incoming[span.start : span.stop]))
        self._peers.append(span.peer)

    @property
    def count(self) -> int:
        """Messages received."""
        return len(self._peers)

    def damaged(self) -> list[int]:
        """Peers (positions in the group) whose bytes differ from what they sealed."""
        if not self._peers:
            return []
        differ = torch.stack(self._sealed)[:, 0] != torch.stack(self._found)
        return sorted({peer for peer, wrong in zip(self._peers, differ.tolist(), strict=True) if wrong})

    def versions(self) -> dict[int, int]:
        """Version of the weights by peer."""
        if not self._peers:
            return {}
        return dict(zip(self._peers, torch.stack(self._sealed)[:, 1].tolist(), strict=True))


class Step:
    """One round on one rank: pack, communicate, unpack.

    Args:
        outgoing: one span per message sent; one for all members in an all-gather.
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
        self._packed, self._unpacked = packed, unpacked
        self._is_gather = is_gather
        self.send_bytes = max((span.end for span in outgoing), default=0)
        self.recv_bytes = (
            self.send_bytes * gather_size if is_gather else max((span.end for span in incoming), default=0)
        )
        self.payload_bytes = sum(span.stop - span.start for span in incoming)

    @property
    def packed_names(self) -> set[str]:
        """Source parameters that this step sends."""
        return {piece.region.name for piece in self._packed}

    @property
    def unpacked_names(self) -> set[str]:
        """Target parameters that this step writes."""
        return {piece.region.name for piece in self._unpacked}

    def pack(self, held: _Tensors, outgoing: torch.Tensor, dtype: torch.dtype, version: int) -> None:
        """Copies this rank's pieces into the buffer, cast to `dtype`, and seals every message."""
        for start, stop, region in self._packed:
            view = region.of(held)
            outgoing[start:stop].view(dtype).view(view.shape).copy_(view)
        for span in self._outgoing:
            seal = outgoing[span.seal : span.end].view(torch.int64)
            seal[0] = digest_words(outgoing[span.start : span.stop])
            seal[1] = version

    def start(self, outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup | None) -> list[dist.Work]:
        """Starts the communication; buffers must stay alone until `finish`."""
        if self._is_gather and not gathers_by_messages(incoming):
            work = dist.all_gather_single(
                incoming[: self.recv_bytes], outgoing[: self.send_bytes], group=group, async_op=True
            )
            return [work]
        sent = [(outgoing[span.start : span.end], span.peer) for span in self._outgoing]
        if self._is_gather:
            ((share, _),) = sent
            sent = [(share, span.peer) for span in self._incoming]
        operations = [dist.P2POp(dist.isend, part, group=group, group_peer=peer) for part, peer in sent]
        operations += [
            dist.P2POp(dist.irecv, incoming[span.start : span.end], group=group, group_peer=span.peer)
            for span in self._incoming
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def unpack(self, incoming: torch.Tensor, wanted: _Tensors, dtype: torch.dtype, seals: Seals) -> None:
        """Copies what arrived into this rank's target tensors."""
        for span in self._incoming:
            seals.add(incoming, span)
        for start, stop, region in self._unpacked:
            view = region.of(wanted)
            view.copy_(incoming[start:stop].view(dtype).view(view.shape))


def build_step(
    round_: GatherRound | PeerRound, members: Sequence[int], rank: int, held: _Boxes, wanted: _Boxes, item_bytes: int
) -> Step:
    """Lays one round out in this rank's buffers."""
    if isinstance(round_, GatherRound):
        return _gather_step(round_, members, rank, held, wanted, item_bytes)
    outgoing: dict[int, list[Message]] = defaultdict(list)
    incoming: dict[int, list[Message]] = defaultdict(list)
    for message in round_.messages:
        if message.source == rank:
            for destination in message.destinations:
                outgoing[members.index(destination)].append(message)
        elif rank in message.destinations:
            incoming[members.index(message.source)].append(message)
    packed, sent = _lay_out(outgoing, held, item_bytes)
    unpacked, received = _lay_out(incoming, wanted, item_bytes)
    return Step(outgoing=sent, incoming=received, packed=packed, unpacked=unpacked, is_gather=False)


def _gather_step(
    round_: GatherRound, members: Sequence[int], rank: int, held: _Boxes, wanted: _Boxes, item_bytes: int
) -> Step:
    """Shares lie one after the other in the incoming buffer, in member order."""
    own = members.index(rank)
    share = _span(own, 0, round_.share_numel * item_bytes)
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
    incoming = [_span(i, i * share.end, share.stop) for i in range(len(members)) if i != own]
    return Step(
        outgoing=[share],
        incoming=incoming,
        packed=packed,
        unpacked=unpacked,
        is_gather=True,
        gather_size=len(members),
    )


def _lay_out(
    by_peer: Mapping[int, Sequence[Message]], boxes: _Boxes, item_bytes: int
) -> tuple[list[_Piece], list[_Span]]:
    """Places every peer's pieces in one flat buffer, each peer's followed by the seal."""
    pieces: list[_Piece] = []
    spans: list[_Span] = []
    position = 0
    for peer in sorted(by_peer):
        first = position
        for message in by_peer[peer]:
            stop = position + message.box.numel * item_bytes
            pieces.append(_Piece(position, stop, locate(boxes, message.name, message.box)))
            position = stop
        spans.append(_span(peer, first, position - first))
        position = spans[-1].end
    return pieces, spans


def _span(peer: int, start: int, num_bytes: int) -> _Span:
    """Payloads start, and seals lie, at multiples of eight bytes."""
    return _Span(peer, start, start + num_bytes, start + -(-num_bytes // 8) * 8)
