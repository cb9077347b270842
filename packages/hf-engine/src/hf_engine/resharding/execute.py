"""Running a reshard plan on tensors: the only collectives that move weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.plan import Message, ReshardPlan
from hf_engine.resharding.rounds import GatherRound, PeerRound, compute_rounds
from hf_protocols.errors import ReshardError

__all__ = ["DEFAULT_BUCKET_BYTES", "ReshardExecutor", "Weights", "check_weights", "execute_reshard"]

DEFAULT_BUCKET_BYTES = 64 << 20
"""Bound on the bytes that a rank sends, and on those that it receives, in one round."""

Weights = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
"""A rank's tensors by Hugging Face name: one tensor per box of its layout, a bare tensor where there is one box."""


class ReshardExecutor:
    """Runs one plan again and again: rounds are computed once, buffers are allocated once.

    Args:
        plan: from `plan_reshard`; the same on every rank.
        group: the process group that connects the plan's ranks; None is the default group. Plan ranks are
            torch.distributed's global ranks of the group unless `ranks` says otherwise.
        ranks: plan rank of every group rank, in group order.
        bucket_bytes: bound on the bytes sent, and on those received, in one round.
        device: where the communication buffers live; the tensors themselves may live elsewhere.

    Raises:
        ReshardError: if this rank would exchange bytes with a rank outside the group.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        group: dist.ProcessGroup | None = None,
        ranks: Sequence[int] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        device: torch.device | str = "cpu",
    ) -> None:
        if bucket_bytes < plan.target.element_bytes:
            raise ReshardError(f"bucket_bytes={bucket_bytes} does not hold one {plan.target.dtype} element")
        self._plan = plan
        self._group = group
        self._members = tuple(ranks if ranks is not None else dist.get_process_group_ranks(group or dist.group.WORLD))
        self._rank = self._members[dist.get_rank(group)]
        self._check_peers()
        rounds = compute_rounds(plan, self._members, bucket_bytes // plan.target.element_bytes)
        held, wanted = plan.source.boxes_of(self._rank), plan.target.boxes_of(self._rank)
        self._kept = [
            (_locate(wanted, name, box), _locate(held, name, box)) for name, box in plan.kept.get(self._rank, ())
        ]
        self._steps = [
            _GatherStep(round_, self._members, self._rank, held, wanted)
            if isinstance(round_, GatherRound)
            else _PeerStep(round_, self._members, self._rank, held, wanted)
            for round_ in rounds
        ]
        dtype = getattr(torch, plan.target.dtype)
        self._outgoing = torch.empty(max((s.send_numel for s in self._steps), default=0), dtype=dtype, device=device)
        self._incoming = torch.empty(max((s.recv_numel for s in self._steps), default=0), dtype=dtype, device=device)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the communication buffers, kept from step to step."""
        return self._outgoing.nbytes + self._incoming.nbytes

    @torch.no_grad()
    def run(self, source: Weights, target: Weights) -> int:
        """Fills this rank's target tensors from everybody's source tensors. Collective over the group.

        Args:
            source: this rank's tensors in the source layout; read only.
            target: this rank's tensors in the target layout; written in place, cast where dtypes differ.

        Returns:
            Bytes that this rank received from other ranks.

        Raises:
            ReshardError: for tensors that do not match the layout, or a transfer that fails on the way.
        """
        check_weights(self._plan.source, self._rank, source, "source")
        check_weights(self._plan.target, self._rank, target, "target")
        held = {name: _as_list(tensors) for name, tensors in source.items()}
        wanted = {name: _as_list(tensors) for name, tensors in target.items()}
        for destination, origin in self._kept:
            destination.of(wanted).copy_(origin.of(held))
        received = 0
        for step in self._steps:
            outgoing, incoming = self._outgoing[: step.send_numel], self._incoming[: step.recv_numel]
            for start, stop, region in step.packed:
                view = region.of(held)
                outgoing[start:stop].view(view.shape).copy_(view)
            try:
                received += step.communicate(outgoing, incoming, self._group)
            except RuntimeError as error:
                raise ReshardError(f"the transfer of weights failed on rank {self._rank}: {error}") from error
            for start, stop, region in step.unpacked:
                view = region.of(wanted)
                view.copy_(incoming[start:stop].view(view.shape))
        return received * self._plan.target.element_bytes

    def _check_peers(self) -> None:
        reached = {
            rank
            for m in self._plan.messages
            if self._rank in m.participants
            for rank in ({m.source} if m.source != self._rank else m.destinations)
        }
        if outside := sorted(reached - set(self._members)):
            raise ReshardError(
                f"rank {self._rank} exchanges weights with ranks {outside}, which are not in its group "
                f"{self._members}; run the plan over a group that holds all of them"
            )


def execute_reshard(
    plan: ReshardPlan,
    source: Weights,
    target: Weights,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> int:
    """Runs a plan once and returns the bytes that this rank received; see `ReshardExecutor` to run it often."""
    # Buffers live with the source where there is one: a target on the host may be filled from a device.
    device = next((tensor.device for tensor in (*_flat(source), *_flat(target))), "cpu")
    return ReshardExecutor(plan, group=group, bucket_bytes=bucket_bytes, device=device).run(source, target)


def check_weights(layout: WeightLayout, rank: int, weights: Weights, what: str) -> None:
    """Compares a rank's tensors with its boxes.

    Raises:
        ReshardError: naming every tensor that is missing, extra or mis-shaped.
    """
    expected = layout.boxes_of(rank)
    problems = []
    if missing := sorted(name for name in expected if name not in weights):
        problems.append(f"missing {missing}")
    if extra := sorted(name for name in weights if name not in expected):
        problems.append(f"extra {extra}")
    for name, boxes in expected.items():
        shapes = [tuple(tensor.shape) for tensor in _as_list(weights.get(name, ()))]
        if name in weights and shapes != [box.shape for box in boxes]:
            problems.append(f"{name!r} has shapes {shapes}, the layout says {[box.shape for box in boxes]}")
    if problems:
        raise ReshardError(f"the {what} tensors of rank {rank} do not match the layout: {'; '.join(problems)}")


class _Region(NamedTuple):
    """A part of one of this rank's tensors."""

    name: str
    part: int
    slices: tuple[slice, ...]

    def of(self, tensors: Mapping[str, Sequence[torch.Tensor]]) -> torch.Tensor:
        return tensors[self.name][self.part][self.slices]


_Boxes = Mapping[str, tuple[Box, ...]]
_Piece = tuple[int, int, _Region]
"""Start and stop in the flat buffer, and the region that is copied from or to there."""


def _locate(boxes: _Boxes, name: str, box: Box) -> _Region:
    """Finds the one box of a rank that contains `box`."""
    part, container = next((i, candidate) for i, candidate in enumerate(boxes[name]) if candidate.contains(box))
    return _Region(name, part, box.slices_in(container))


class _GatherStep:
    """One all-gather: shares lie one after the other in the buffer, in member order."""

    def __init__(self, round_: GatherRound, members: Sequence[int], rank: int, held: _Boxes, wanted: _Boxes) -> None:
        self.send_numel = round_.share_numel
        self.recv_numel = round_.share_numel * len(members)
        own = members.index(rank)
        self.packed: list[_Piece] = []
        self.unpacked: list[_Piece] = []
        start = 0
        for slot in round_.slots:
            numel = slot.boxes[own].numel
            self.packed.append((start, start + numel, _locate(held, slot.name, slot.boxes[own])))
            for index, box in enumerate(slot.boxes):
                if index != own:
                    base = index * self.send_numel + start
                    self.unpacked.append((base, base + numel, _locate(wanted, slot.name, box)))
            start += numel

    def communicate(self, outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup | None) -> int:
        dist.all_gather_single(incoming, outgoing, group=group)
        return incoming.numel() - outgoing.numel()


class _PeerStep:
    """One batch of sends and receives: one flat message per peer and direction."""

    def __init__(self, round_: PeerRound, members: Sequence[int], rank: int, held: _Boxes, wanted: _Boxes) -> None:
        outgoing: dict[int, list[Message]] = defaultdict(list)
        incoming: dict[int, list[Message]] = defaultdict(list)
        for message in round_.messages:
            if message.source == rank:
                for destination in message.destinations:
                    outgoing[members.index(destination)].append(message)
            elif rank in message.destinations:
                incoming[members.index(message.source)].append(message)
        self.packed, self._sends, self.send_numel = _lay_out(outgoing, held)
        self.unpacked, self._receives, self.recv_numel = _lay_out(incoming, wanted)

    def communicate(self, outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup | None) -> int:
        operations = [
            dist.P2POp(dist.isend, outgoing[start:stop], group=group, group_peer=peer)
            for peer, start, stop in self._sends
        ]
        operations += [
            dist.P2POp(dist.irecv, incoming[start:stop], group=group, group_peer=peer)
            for peer, start, stop in self._receives
        ]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return incoming.numel()


def _lay_out(
    by_peer: Mapping[int, Sequence[Message]], boxes: _Boxes
) -> tuple[list[_Piece], list[tuple[int, int, int]], int]:
    """Places every peer's pieces in one flat buffer: pieces, (peer, start, stop) spans, total length."""
    pieces: list[_Piece] = []
    spans = []
    position = 0
    for peer in sorted(by_peer):
        first = position
        for message in by_peer[peer]:
            stop = position + message.box.numel
            pieces.append((position, stop, _locate(boxes, message.name, message.box)))
            position = stop
        spans.append((peer, first, position))
    return pieces, spans, position


def _as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _flat(weights: Weights) -> Iterator[torch.Tensor]:
    for tensors in weights.values():
        yield from _as_list(tensors)
