"""The order in which a plan runs: buffers of bounded size, one collective or one batch of messages each. Pure.

Every rank computes the same rounds from the same plan, so nothing about the order is ever sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hf_engine.resharding.boxes import Box, split_box
from hf_engine.resharding.plan import Message, ReshardPlan

__all__ = ["GatherRound", "GatherSlot", "PeerRound", "compute_rounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSlot:
    """One parameter in an all-gather: every member's box has the same shape and goes to every other member."""

    name: str
    boxes: tuple[Box, ...]
    """One per member, in the order of the members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRound:
    """One flat all-gather; a member's share is its box of every slot, one after the other."""

    slots: tuple[GatherSlot, ...]

    @property
    def share_numel(self) -> int:
        """Elements that each member contributes."""
        return sum(slot.boxes[0].numel for slot in self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRound:
    """One batch of point-to-point transfers: between two ranks at most one, with all their messages in order."""

    messages: tuple[Message, ...]


def compute_rounds(plan: ReshardPlan, members: Sequence[int], bucket_numel: int) -> tuple[GatherRound | PeerRound, ...]:
    """Cuts a plan's messages among `members` into rounds.

    Pieces that all members exchange with all others (FSDP -> replicated, the paper's micro-DP groups) become
    all-gathers; their uneven rests and everything else become point-to-point rounds. Bytes received are exactly
    the plan's: nothing is padded.

    Args:
        plan: the whole plan; messages that concern none of the members are left out.
        members: the ranks of one process group, in group order.
        bucket_numel: the most elements that a rank sends, or receives, in one round.
    """
    inside = frozenset(members)
    everyone: list[Message] = []
    others: list[Message] = []
    for message in plan.messages:
        if message.participants == inside:
            everyone.append(message)
        elif message.participants & inside:
            others.append(message)
    slots, rests = _gather_slots(everyone, members)
    rounds: list[GatherRound | PeerRound] = list(_gather_rounds(slots, len(members), bucket_numel))
    rounds.extend(_peer_rounds([*rests, *others], bucket_numel))
    return tuple(rounds)


def _gather_slots(messages: Iterable[Message], members: Sequence[int]) -> tuple[list[GatherSlot], list[Message]]:
    """Matches one message of every member, name by name; what does not match stays a message."""
    queues: dict[str, dict[int, list[Message]]] = defaultdict(lambda: {rank: [] for rank in members})
    for message in messages:
        queues[message.name][message.source].append(message)
    slots: list[GatherSlot] = []
    rests: list[Message] = []
    for name, by_rank in queues.items():
        depth = min(len(queue) for queue in by_rank.values())
        for index in range(depth):
            matched = [by_rank[rank][index] for rank in members]
            if len({(len(m.box.shape), m.box.shape[1:]) for m in matched}) > 1:
                rests.extend(matched)
                continue
            rows = min(m.box.shape[0] for m in matched)
            slots.append(GatherSlot(name=name, boxes=tuple(_rows(m.box, 0, rows) for m in matched)))
            rests.extend(_with_box(m, _rows(m.box, rows, m.box.shape[0])) for m in matched if m.box.shape[0] > rows)
        for queue in by_rank.values():
            rests.extend(queue[depth:])
    return slots, rests


def _gather_rounds(slots: Iterable[GatherSlot], num_members: int, bucket_numel: int) -> Iterator[GatherRound]:
    share = max(1, bucket_numel // max(1, num_members))
    batch: list[GatherSlot] = []
    filled = 0
    for slot in slots:
        for boxes in zip(*(split_box(box, share) for box in slot.boxes), strict=True):
            if filled + boxes[0].numel > share and batch:
                yield GatherRound(slots=tuple(batch))
                batch, filled = [], 0
            batch.append(GatherSlot(name=slot.name, boxes=boxes))
            filled += boxes[0].numel
    if batch:
        yield GatherRound(slots=tuple(batch))


def _peer_rounds(messages: Iterable[Message], bucket_numel: int) -> Iterator[PeerRound]:
    batch: list[Message] = []
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for message in messages:
        # The sender packs one copy per receiver, so all of them count against its buffer.
        for box in split_box(message.box, max(1, bucket_numel // len(message.destinations))):
            outgoing = box.numel * len(message.destinations)
            incoming = max(received[rank] for rank in message.destinations) + box.numel
            if batch and (sent[message.source] + outgoing > bucket_numel or incoming > bucket_numel):
                yield PeerRound(messages=tuple(batch))
                batch = []
                sent.clear()
                received.clear()
            batch.append(_with_box(message, box))
            sent[message.source] += outgoing
            for rank in message.destinations:
                received[rank] += box.numel
    if batch:
        yield PeerRound(messages=tuple(batch))


def _rows(box: Box, start: int, stop: int) -> Box:
    return Box((box.offset[0] + start, *box.offset[1:]), (stop - start, *box.shape[1:]))


def _with_box(message: Message, box: Box) -> Message:
    return Message(source=message.source, destinations=message.destinations, name=message.name, box=box)
