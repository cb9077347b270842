"""The general transition: weights go from training ranks to generation ranks that are others, by the same plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from hf_engine.resharding.execute import DEFAULT_BUCKET_BYTES, ReshardExecutor, Transfer, Weights
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.plan import ReshardPlan, plan_reshard
from hf_protocols.errors import ReshardError

__all__ = ["WeightSync"]


class WeightSync:
    """Sends weights between the two sides of one process group. Every rank of the group makes one, at the same time.

    Example:
        sync = WeightSync(train.weight_layout(), side="source", group=group)  # on training ranks
        sync.send(train.local_weights(), version=3)

        sync = WeightSync(rollout.weight_layout(), side="target", group=group)  # on generation ranks
        rollout.commit_weights(sync.receive(rollout.weight_buffers()))

    Args:
        layout: of this rank's side. Its rank i is the i-th rank of that side in the group's order.
        side: `"source"` sends, `"target"` receives.
        group: joins both sides (`hf_controller.connect` makes one); None is the default group.
        bucket_bytes: bound on the communication buffers.
        device: where these live.

    Raises:
        ReshardError: on every rank, if a side has no ranks, or other ranks than its layout, the layouts are not of one
            model, or any rank was given an argument of a wrong kind.
    """

    def __init__(
        self,
        layout: WeightLayout,
        *,
        side: Literal["source", "target"],
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        device: torch.device | str = "cpu",
    ) -> None:
        self._side = side
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        sides = _agreed_sides(side, layout, bucket_bytes, group)
        source, target = (
            _share(layout if side == name else None, [i for i, other in enumerate(sides) if other == name], name, group)
            for name in ("source", "target")
        )
        self._plan = plan_reshard(source, target)
        self._executor = ReshardExecutor(
            self._plan, group=group, ranks=range(len(members)), bucket_bytes=bucket_bytes, device=device
        )

    @property
    def plan(self) -> ReshardPlan:
        """What every rank sends and receives; ranks are those of the group."""
        return self._plan

    def send(self, weights: Weights, *, version: int) -> Transfer:
        """Sends this rank's weights; the target's ranks must receive at the same time.

        Args:
            weights: this rank's tensors in the source layout.
            version: of the weights; it must be the same on all source ranks.

        Raises:
            ReshardError: on the target side, for tensors that do not match, or a transfer that fails.
        """
        return self._executor.run(weights, {}, version=version, refusal=self._misplaced("source", "send"))

    def receive(self, buffers: Weights) -> int:
        """Receives weights into this rank's tensors, be it none; the version that the source's ranks sent.

        Raises:
            ReshardError: on the source side, for tensors that do not match, a transfer that fails, damaged bytes,
                senders of different versions, or a layout under which nobody receives anything. The buffers
                are not complete then: do not commit them.
        """
        version = self._executor.run({}, buffers, refusal=self._misplaced("target", "receive")).version
        if version is None:
            raise ReshardError("no weights were sent: the layout of the target side holds none on any of its ranks")
        return version

    def _misplaced(self, side: str, method: str) -> ReshardError | None:
        if self._side == side:
            return None
        return ReshardError(f"{method} is for the {side} side, this rank was made with side={self._side!r}")


def _agreed_sides(side: str, layout: WeightLayout, bucket_bytes: int, group: dist.ProcessGroup | None) -> list[str]:
    """The side of every rank of the group; one rank's mistake is an error on all."""
    mistake = None
    if side not in ("source", "target"):
        mistake = f'side={side!r}: give "source" or "target"'
    elif not isinstance(layout, WeightLayout):
        mistake = f"layout={layout!r}: give a WeightLayout, such as a backend's weight_layout()"
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (side, bucket_bytes, mistake), group=group)
    if mistakes := [f"rank {rank}: {mistake}" for rank, (_, _, mistake) in enumerate(told) if mistake]:
        raise ReshardError("; ".join(mistakes))
    if len(sizes := {size for _, size, _ in told}) > 1:
        raise ReshardError(f"the ranks were given bucket_bytes of {sorted(sizes)}: give all the same")
    return [each for each, _, _ in told]


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
