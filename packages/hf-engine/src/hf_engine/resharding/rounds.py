"""The order in which a plan runs: buffers of bounded size, one collective or one batch of messages each. Pure.

Every rank computes the same rounds from the same plan, so nothing about the order is ever sent.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from hf_engine.resharding.boxes import Box, split_box
from hf_engine.resharding.plan import Message, ReshardPlan

__all__ = ["GatherRound", "GatherSlot", "PeerRound", "compute_rounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSlot:
    """One piece of every member in an all-gather: the boxes have the same shape and go to every other member."""

    names: tuple[str, ...]
    """Parameter of every member's box, in the order of the members; stages contribute different ones."""
    boxes: tuple[Box, ...]
    """One per member."""


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
    """One batch of point-to-point transfers: from one rank to the same others at most one, their messages in order."""

    messages: tuple[Message, ...]


def compute_rounds(plan: ReshardPlan, members: Sequence[int], bucket_numel: int) -> tuple[GatherRound | PeerRound, ...]:
    """Cuts a plan's messages among `members` into rounds.

    Pieces that all members exchange with all others (FSDP -> replicated, the paper's micro-DP groups) become
    all-gathers, shards of one parameter as well as layers of equal stages. Their uneven rests and everything else
    become point-to-point rounds. Bytes received are exactly the plan's: nothing is padded. Parameters come one after
    the other, so that few are on their way at once; large modules first, while there is room for them twice.

    Args:
        plan: the whole plan; messages that concern none of the members are left out.
        members: the ranks of one process group, in group order.
        bucket_numel: the most elements that a rank sends, or receives, in one round.
    """
    inside = frozenset(members)
    size = _module_sizes(plan)
    messages = sorted((m for m in plan.messages if m.participants & inside), key=lambda m: -size[_module_of(m.name)])
    place = {id(message): index for index, message in enumerate(messages)}
    matches = _match([message for message in messages if message.participants == inside], members)
    taken = {id(message) for matched in matches for message in matched}
    items: list[tuple[int, GatherSlot | Message]] = [(place[id(m)], m) for m in messages if id(m) not in taken]
    for matched in matches:
        slot, rests = _slot_of(matched)
        first = min(place[id(message)] for message in matched)
        items += [(first, slot), *((first, rest) for rest in rests)]
    batches = _Batches(members, bucket_numel)
    for _, item in sorted(items, key=lambda pair: pair[0]):
        batches.add(item)
    return batches.close()


def _module_of(name: str) -> str:
    """Returns the common prefix of the parameters of a fused storage: `layers.0.self_attn` of its `q_proj.weight`."""
    return ".".join(name.split(".")[:-2])


def _layer_of(name: str) -> str:
    """Up to the first number, which counts the layers; all of a name without one."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name


def _module_sizes(plan: ReshardPlan) -> Mapping[str, int]:
    """Elements of every module's largest parameter."""
    sizes: dict[str, int] = defaultdict(int)
    for name, shape in plan.target.shapes.items():
        sizes[_module_of(name)] = max(sizes[_module_of(name)], prod(shape))
    return sizes


class _Batches:
    """Fills rounds. Gathers wait for company across messages, but not for long: a parameter that is partly gathered
    and partly sent occupies memory twice until both are done.
    """

    def __init__(self, members: Sequence[int], bucket_numel: int) -> None:
        self._members = members
        self._bucket_numel = bucket_numel
        self._share_numel = max(1, bucket_numel // len(members))
        self._rounds: list[GatherRound | PeerRound] = []
        self._slots: list[GatherSlot] = []
        self._filled = 0
        self._messages: list[Message] = []
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)
        self._open_numel: dict[int, int] = defaultdict(int)

    def add(self, item: GatherSlot | Message) -> None:
        """Appends one item, cut to size."""
        if isinstance(item, GatherSlot):
            for boxes in zip(*(split_box(box, self._share_numel) for box in item.boxes), strict=True):
                self._add_slot(GatherSlot(names=item.names, boxes=boxes))
            for rank, box in zip(self._members, item.boxes, strict=True):
                self._open_numel[rank] += box.numel
        else:
            for box in split_box(item.box, self._bucket_numel):
                self._add_message(_with_box(item, box))
            self._open_numel[item.source] += item.box.numel
        if self._messages and max(self._open_numel.values()) >= self._bucket_numel:
            self.close()

    def close(self) -> tuple[GatherRound | PeerRound, ...]:
        """Ends the rounds that are being filled; all rounds so far."""
        self._close_gather()
        self._close_exchange()
        return tuple(self._rounds)

    def _add_slot(self, slot: GatherSlot) -> None:
        if self._filled + slot.boxes[0].numel > self._share_numel:
            self._close_gather()
        self._slots.append(slot)
        self._filled += slot.boxes[0].numel

    def _add_message(self, message: Message) -> None:
        # The sender packs one copy for all receivers.
        outgoing = self._sent[message.source] + message.box.numel
        incoming = max(self._received[rank] for rank in message.destinations) + message.box.numel
        if max(outgoing, incoming) > self._bucket_numel:
            self._close_exchange()
        self._messages.append(message)
        self._sent[message.source] += message.box.numel
        for rank in message.destinations:
            self._received[rank] += message.box.numel

    def _close_gather(self) -> None:
        if self._slots:
            self._rounds.append(GatherRound(slots=tuple(self._slots)))
        self._slots, self._filled = [], 0
        if not self._messages:
            self._open_numel.clear()

    def _close_exchange(self) -> None:
        if self._messages:
            self._rounds.append(PeerRound(messages=tuple(self._messages)))
        self._messages = []
        self._sent.clear()
        self._received.clear()
        if not self._slots:
            self._open_numel.clear()


def _match(messages: Sequence[Message], members: Sequence[int]) -> list[list[Message]]:
    """One message of every member, again and again: what one all-gather can bring.

    First name by name, which shards of one parameter need. Then, across names, boxes of equal shapes: experts of one
    layer, of which some members may have more than others and must not wait for another layer's. Last come the layers
    of equal pipeline stages.
    """
    found = [
        matched
        for matched in _matches(messages, members, lambda message: message.name)
        if len({(len(m.box.shape), m.box.shape[1:]) for m in matched}) == 1
    ]
    keys: tuple[Callable[[Message], object], ...] = (
        lambda message: (_layer_of(message.name), message.box.shape),
        lambda message: message.box.shape,
    )
    for key_of in keys:
        taken = {id(message) for matched in found for message in matched}
        found += _matches([message for message in messages if id(message) not in taken], members, key_of)
    return found


def _matches(
    messages: Iterable[Message], members: Sequence[int], key_of: Callable[[Message], object]
) -> list[list[Message]]:
    """One message of every member with equal keys, as often as all of them have another."""
    queues: dict[object, dict[int, list[Message]]] = defaultdict(lambda: {rank: [] for rank in members})
    for message in messages:
        queues[key_of(message)][message.source].append(message)
    return [[*matched] for by_rank in queues.values() for matched in zip(*by_rank.values(), strict=False)]


def _slot_of(matched: Sequence[Message]) -> tuple[GatherSlot, list[Message]]:
    """The rows that all of them have, and the messages of the rest."""
    names = tuple(message.name for message in matched)
    if len({message.box.shape for message in matched}) == 1:
        return GatherSlot(names=names, boxes=tuple(message.box for message in matched)), []
    rows = min(message.box.shape[0] for message in matched)
    boxes = tuple(_rows(message.box, 0, rows) for message in matched)
    longer = [message for message in matched if message.box.shape[0] > rows]
    return GatherSlot(names=names, boxes=boxes), [_with_box(m, _rows(m.box, rows, m.box.shape[0])) for m in longer]


def _rows(box: Box, start: int, stop: int) -> Box:
    return Box((box.offset[0] + start, *box.offset[1:]), (stop - start, *box.shape[1:]))


def _with_box(message: Message, box: Box) -> Message:
    return Message(source=message.source, destinations=message.destinations, name=message.name, box=box)
