"""The general transition: weights go from training ranks to separate generation ranks, by the same plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist

from hf_engine.agreement import Agreement, check_version, together
from hf_engine.process_groups import find_machines
from hf_engine.resharding.execute import (
    DEFAULT_BUCKET_BYTES,
    Parts,
    ReshardExecutor,
    Transfer,
    Weights,
    check_bucket_bytes,
    note_version,
    require_one_version,
)
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.members import choose_device, find_members
from hf_engine.resharding.plan import ReshardPlan, plan_reshard
from hf_protocols.errors import HybridFlowError, ReshardError
from hf_protocols.validation import Checks, show

__all__ = ["WeightSync"]

_check = Checks(ReshardError)


class WeightSync:
    """Sends weights between the two sides of one process group. Every rank of the group makes one, at the same time.

    Example:
        # on training ranks
        sync = WeightSync(train.weight_layout(), side="source", group=group, buffers=train.buffers())
        sync.send(train.local_weights(), version=3)

        # on generation ranks
        sync = WeightSync(rollout.weight_layout(), side="target", group=group, buffers=rollout.buffers())
        rollout.commit_weights(sync.receive(rollout.weight_buffers()))

    Args:
        layout: of this rank's side. Its rank i is the i-th rank of that side in the group's order.
        side: `"source"` sends, `"target"` receives.
        group: joins both sides (`hf_controller.connect` makes one); None is the default group.
        bucket_bytes: bound on the communication buffers.
        device: where these live; None: where the group communicates, the host over gloo and else the rank's device.
        buffers: the live persistent buffers of this rank's model, whole, such as those of a backend that
            `SupportsBuffers`. Those of the first source rank come with the weights, each in its own dtype.
        verify_transfers: as in `ReshardExecutor`.

    Raises:
        ReshardError: on every rank, if a side has no ranks or other ranks than its layout, or if any rank was given an
            invalid argument. Also if the layouts or buffers are not those of one model, or differ between the ranks of
            a side.
    """

    def __init__(
        self,
        layout: WeightLayout,
        *,
        side: Literal["source", "target"],
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        device: torch.device | str | None = None,
        buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
        verify_transfers: bool = False,
    ) -> None:
        self._side = side
        self._version = -1
        members, _ = find_members(group, None)
        options = {"bucket_bytes": bucket_bytes, "verify_transfers": verify_transfers}
        sides, machines = _agreed_sides(side, layout, options, device, group, buffers), find_machines(group)
        self._buffers, self._group, self._device = dict(buffers), group, choose_device(device, group)
        self._first_source = sides.index("source") if "source" in sides else 0
        source, target = (
            _share(layout if side == name else None, [i for i, other in enumerate(sides) if other == name], name, group)
            for name in ("source", "target")
        )
        given = source if side == "source" else target
        with self._together():
            if not _is_same(layout, given):
                raise ReshardError(f"its layout is not that of the first {side} rank")
        self._plan = plan_reshard(source, target, near=[machines])
        self._executor = ReshardExecutor(
            self._plan, group=group, ranks=range(len(members)), device=device, **cast("Any", options)
        )

    @property
    def plan(self) -> ReshardPlan:
        """Plan of a run: the weights that every rank sends and receives; ranks are those of the group."""
        return self._plan

    def send(self, weights: Weights, *, version: int) -> Transfer:
        """Sends this rank's weights; the target's ranks must receive at the same time.

        Args:
            weights: this rank's tensors in the source layout.
            version: of the weights, above that of the last transfer; it must be the same on all source ranks.

        Raises:
            ReshardError: on all ranks of the group, before anything moves: for the target side, for tensors that do not
                match, for a version that does not go up, or that is not the other ranks'. Afterwards, for damaged bytes
                (`verify_transfers`), and on this rank alone for another message than it should receive.
        """
        with self._together() as agreement:
            self._check("source", "send", version)
            if version is None:
                raise ReshardError(
                    "send(version=None): the source side names the version. Use a whole number of at least 0"
                )
            note_version(agreement, version)
            parts = self._executor.check(weights, {})
        return self._exchange(parts, version, agreement)

    def receive(self, buffers: Weights, *, version: int | None = None) -> int:
        """Receives weights into this rank's tensors, if it has any; returns the version that the source's ranks sent.

        Args:
            buffers: this rank's tensors in the target layout; written in place.
            version: that this rank expects: any other is refused on all ranks. None takes what is sent, if it is above
                that of the last transfer.

        Raises:
            ReshardError: on all ranks, before anything moves: on the source side, for tensors that do not match, or for
                versions that differ or are not expected. Afterwards, for damaged bytes (`verify_transfers`), for a
                layout under which nobody receives anything, and on this rank alone for another message than it should
                receive. The buffers are not complete then: do not commit them.
        """
        with self._together() as agreement:
            self._check("target", "receive", version)
            note_version(agreement, version)
            parts = self._executor.check({}, buffers)
        self._exchange(parts, version, agreement)
        if not self._plan.transfers:
            raise ReshardError("no weights were sent: no rank of the target side holds a box in its layout")
        return self._version

    def _exchange(self, parts: tuple[Parts, Parts], named: int | None, agreement: Agreement) -> Transfer:
        """Moves buffers and weights of the version that all ranks agreed on."""
        version = require_one_version(agreement, named, self._group, range(dist.get_world_size(self._group)))
        assert version is not None, "the source side names it"
        self._bring_buffers()
        transfer = self._executor.exchange(*parts, version=version)
        self._version = version
        return transfer

    @torch.no_grad()
    def _bring_buffers(self) -> None:
        """Copies the first source rank's buffers into those of the target side."""
        for buffer in self._buffers.values():
            sent = buffer.detach().to(self._device).contiguous().clone()
            dist.broadcast(sent.view(-1).view(torch.uint8), group=self._group, group_src=self._first_source)
            if self._side == "target":
                buffer.copy_(sent)

    def _together(self) -> AbstractContextManager[Agreement]:
        """A block of checks that either all ranks of both sides pass or none."""
        members = range(dist.get_world_size(self._group))
        return together("no weights were moved", self._group, error=ReshardError, device=self._device, ranks=members)

    def _check(self, side: str, method: str, version: int | None) -> None:
        """Refuses a call before its tensors are looked at."""
        if self._side != side:
            raise ReshardError(f"{method} is for the {side} side, this rank was made with side={show(self._side)}")
        if version is None:
            return
        check_version(version, ReshardError)
        if version <= self._version:
            raise ReshardError(f"version={version} must be above {self._version}, that of the last transfer")


def _agreed_sides(
    side: str,
    layout: WeightLayout,
    options: Mapping[str, int],
    device: torch.device | str | None,
    group: dist.ProcessGroup | None,
    buffers: Mapping[str, torch.Tensor],
) -> list[str]:
    """The side of every rank of the group; one rank's mistake is an error on all."""
    mistake = None
    held: list[tuple[str, tuple[int, ...], str]] = []
    try:
        if side not in ("source", "target"):
            raise ReshardError(f'side={show(side)}. Use "source" or "target"')
        _check.kind("layout", layout, WeightLayout, "a WeightLayout, such as a backend's weight_layout()")
        check_bucket_bytes(options["bucket_bytes"], layout)
        _check.kind("verify_transfers", options["verify_transfers"], bool, "True or False")
        choose_device(device, group)
        _check.kind("buffers", buffers, Mapping, "a mapping from names to tensors, such as a backend's buffers()")
        for name, buffer in buffers.items():
            _check.kind(f"buffers[{show(name)}]", buffer, torch.Tensor, "a tensor")
            held.append((name, tuple(buffer.shape), str(buffer.dtype)))
    except HybridFlowError as error:
        mistake = str(error)
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, _Rank(side, options, mistake, held), group=group)
    if mistakes := [f"rank {number}: {rank.mistake}" for number, rank in enumerate(ranks) if rank.mistake]:
        raise ReshardError("; ".join(mistakes))
    for name in options:
        if len(values := {rank.options[name] for rank in ranks}) > 1:
            raise ReshardError(f"the ranks were given {name} of {sorted(values)}. Give all the same")
    _check_buffers([rank.buffers for rank in ranks])
    return [rank.side for rank in ranks]


class _Rank(NamedTuple):
    """One rank's arguments, which all ranks get."""

    side: str
    options: Mapping[str, int]
    mistake: str | None
    buffers: Sequence[tuple[str, tuple[int, ...], str]]
    """Name, shape and dtype of each."""


def _check_buffers(held: Sequence[Sequence[tuple[str, tuple[int, ...], str]]]) -> None:
    """Refuses buffers that are not those of one model on all ranks."""
    for rank, buffers in enumerate(held):
        if differing := sorted({*buffers} ^ {*held[0]}) or ([buffers[0]] if list(buffers) != list(held[0]) else []):
            raise ReshardError(
                f"rank {rank} was given other buffers than rank 0, such as {show(differing[0][0])}. Give all ranks "
                "those of one model"
            )


def _is_same(layout: WeightLayout, shared: WeightLayout) -> bool:
    """Returns True if this rank has the layout that its side's first rank shared, up to the names of ranks."""
    return (layout.dtype, layout.shapes, [layout.boxes_of(rank) for rank in layout.ranks]) == (
        shared.dtype,
        shared.shapes,
        [shared.boxes_of(rank) for rank in shared.ranks],
    )


def _share(
    layout: WeightLayout | None, ranks: Sequence[int], side: str, group: dist.ProcessGroup | None
) -> WeightLayout:
    """One side's layout on every rank, with the group's ranks."""
    if not ranks:
        raise ReshardError(f'no rank of the group was made with side="{side}"')
    shared: list[Any] = [layout]
    dist.broadcast_object_list(shared, group=group, group_src=ranks[0])
    found: WeightLayout = shared[0]
    if len(found.ranks) != len(ranks):
        raise ReshardError(f"the {side} layout has {len(found.ranks)} ranks, its side of the group {len(ranks)}")
    boxes = {rank: found.boxes_of(old) for rank, old in zip(ranks, found.ranks, strict=True)}
    return WeightLayout(shapes=found.shapes, boxes=boxes, dtype=found.dtype)
