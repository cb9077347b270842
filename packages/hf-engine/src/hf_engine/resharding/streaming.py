"""Running a plan some parameters at a time, for a receiver that takes its shards as they come and keeps them itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_engine.resharding.execute import DEFAULT_BUCKET_BYTES, Buffers, Parts, ReshardExecutor, Weights, as_parts
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.members import choose_device, find_members
from hf_engine.resharding.plan import ReshardPlan
from hf_engine.resharding.tensor_checks import check_readable, check_weights

__all__ = ["ShardStream", "group_parameters"]


def group_parameters(layout: WeightLayout, group_bytes: int) -> list[tuple[str, ...]]:
    """Cuts a layout's parameters, in their order, into groups of which no rank holds more than `group_bytes`.

    A parameter that is larger is a group of its own.
    """
    distinct = {id(held): held for held in layout.boxes.values()}.values()
    groups: list[list[str]] = []
    filled = 0
    for name in layout.shapes:
        size = layout.element_bytes * max(sum(box.numel for box in held.get(name, ())) for held in distinct)
        if not groups or filled + size > group_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return [tuple(group) for group in groups]


class ShardStream:
    """Runs one plan again and again in groups of parameters: this rank never holds more than a group of its shard.

    Args:
        plan: from `plan_reshard`; the same on every rank.
        group: as in `ReshardExecutor`.
        bucket_bytes: bound on the communication buffers, and on a group's tensors beyond one parameter.
        device: where both live; None: as in `ReshardExecutor`.
        verify_transfers: as in `ReshardExecutor`.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        device: torch.device | str | None = None,
        verify_transfers: bool = False,
    ) -> None:
        self._plan = plan
        self._device = device = choose_device(device, group)
        self._dtype = getattr(torch, plan.target.dtype)
        self._groups = group_parameters(plan.target, bucket_bytes)
        buffers: Buffers = []
        options: dict[str, Any] = {"group": group, "bucket_bytes": bucket_bytes, "device": device, "buffers": buffers}
        self._executors = [
            ReshardExecutor(plan.select(names), verify_transfers=verify_transfers, **options) for names in self._groups
        ]
        _, self._rank = find_members(group, None)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the communication buffers and of the largest group's tensors."""
        held = self._plan.target.boxes_of(self._rank)
        sizes = [sum(box.numel for name in names for box in held.get(name, ())) for names in self._groups]
        return self._executors[0].buffer_bytes + max(sizes) * self._plan.target.element_bytes

    def check(self, source: Weights) -> Parts:
        """Returns this rank's tensors as `exchange` takes them. Not collective.

        Args:
            source: this rank's tensors in the source layout.

        Raises:
            ReshardError: for tensors that do not match the layout, or that cannot be read.
        """
        check_weights(self._plan.source, self._rank, source, "source")
        sources = as_parts(source)
        check_readable(sources, f"the source tensors of rank {self._rank}")
        return sources

    def exchange(
        self, sources: Parts, take: Callable[[Mapping[str, Sequence[torch.Tensor]]], None], *, version: int
    ) -> int:
        """Sends this rank's weights and hands over its shards, group by group. Collective over the group.

        All ranks of the group agreed already that all of them do, and on the version.

        Args:
            sources: of `check`; read only. Tensors of other parameters may be among them.
            take: called with this rank's tensors of a group, one per box, which are its own from then on.
            version: of the weights.

        Returns:
            Bytes of weights received.

        Raises:
            ReshardError: as `ReshardExecutor.exchange`; groups that were taken before were complete.
        """
        received = 0
        for names, executor in zip(self._groups, self._executors, strict=True):
            targets = self._allocate(names)
            part = {name: sources[name] for name in names if name in sources}
            received += executor.exchange(part, targets, version=version).recv_bytes
            take(targets)
        return received

    def _allocate(self, names: Sequence[str]) -> Parts:
        """This rank's tensors of a group, to be filled."""
        held = self._plan.target.boxes_of(self._rank)
        return {
            name: [torch.empty(box.shape, dtype=self._dtype, device=self._device) for box in held[name]]
            for name in names
            if name in held
        }
