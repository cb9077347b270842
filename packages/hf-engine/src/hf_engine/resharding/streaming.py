"""Running a plan some parameters at a time, for a receiver that takes its shards as they come and keeps them itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from hf_engine.resharding.execute import DEFAULT_BUCKET_BYTES, Buffers, ReshardExecutor, Weights
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.members import find_members
from hf_engine.resharding.plan import ReshardPlan
from hf_engine.resharding.tensor_checks import check_weights

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
        device: where both live.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        device: torch.device | str = "cpu",
    ) -> None:
        self._plan = plan
        self._device = device
        self._dtype = getattr(torch, plan.target.dtype)
        self._groups = group_parameters(plan.target, bucket_bytes)
        buffers: Buffers = []
        self._executors = [
            ReshardExecutor(plan.select(names), group=group, bucket_bytes=bucket_bytes, device=device, buffers=buffers)
            for names in self._groups
        ]
        _, self._rank = find_members(group, None)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the communication buffers and of the largest group's tensors."""
        held = self._plan.target.boxes_of(self._rank)
        sizes = [sum(box.numel for name in names for box in held.get(name, ())) for names in self._groups]
        return self._executors[0].buffer_bytes + max(sizes) * self._plan.target.element_bytes

    def run(
        self,
        source: Weights,
        take: Callable[[Mapping[str, Sequence[torch.Tensor]]], None],
        *,
        version: int,
    ) -> int:
        """Sends this rank's weights and hands over its shards, group by group. Collective over the group.

        Args:
            source: this rank's tensors in the source layout; read only.
            take: called with this rank's tensors of a group, one per box, which are its own from then on.
            version: of the weights.

        Returns:
            Bytes of weights received.

        Raises:
            ReshardError: as `ReshardExecutor.run`; groups that were taken before were complete.
        """
        asking = next((executor for executor in self._executors if not executor.is_silent), self._executors[-1])
        with asking.agreed():
            check_weights(self._plan.source, self._rank, source, "source")
        received = 0
        for names, executor in zip(self._groups, self._executors, strict=True):
            target = self._allocate(names)
            part = {name: source[name] for name in names if name in source}
            received += executor.run(part, target, version=version).recv_bytes
            take(target)
        return received

    def _allocate(self, names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """This rank's tensors of a group, to be filled."""
        held = self._plan.target.boxes_of(self._rank)
        return {
            name: [torch.empty(box.shape, dtype=self._dtype, device=self._device) for box in held[name]]
            for name in names
            if name in held
        }
