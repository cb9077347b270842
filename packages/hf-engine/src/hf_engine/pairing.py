"""A training and a rollout backend on the same ranks: whether they fit, the plan, and who sends weights to whom."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hf_engine.agreement import HIGHEST, spread, together
from hf_engine.backends._abilities import (
    SupportsAdapters,
    SupportsBufferLoading,
    SupportsBuffers,
    SupportsShardLoading,
    SupportsWeightBuffers,
    TakesAdapters,
)
from hf_engine.backends._base import RolloutBackend, TrainBackend
from hf_engine.process_groups import build_groups, local_device, local_world_size
from hf_engine.resharding.execute import as_parts, check_bucket_bytes
from hf_engine.resharding.matching import check_weights
from hf_engine.resharding.plan import ReshardPlan, plan_reshard
from hf_engine.resharding.usable import check_writable
from hf_protocols.arguments import check_kind, show
from hf_protocols.errors import BackendError, ReshardError
from hf_protocols.topology import Topology

__all__ = ["agree_on_plan", "build_transfer_group", "copy_buffers", "pair_adapters"]


def pair_adapters(train: TrainBackend, rollout: RolloutBackend, training_weights: str | None) -> str | None:
    """Has a training backend with adapters show them as the rollout backend takes them: apart, or merged.

    Returns:
        `training_weights`; merged weights are copies, and the training weights stay: `"keep"` by default.

    Raises:
        BackendError: for merged weights that were to be moved, or a rollout backend with other adapters.
    """
    wanted = rollout.held_adapters() if isinstance(rollout, TakesAdapters) else None
    own = train.lora if isinstance(train, SupportsAdapters) else None
    if wanted is not None and (own is None or (own.rank, own.scaling) != (wanted.rank, wanted.scaling)):
        raise BackendError(f"the rollout backend has {wanted}, the training backend {own}: build both with one lora")
    if not isinstance(train, SupportsAdapters):
        return training_weights
    train.keep_adapters_apart(wanted is not None)
    if wanted is None and training_weights == "move":
        raise BackendError(
            'training_weights="move": merged adapters are copies, which the training weights cannot lie in. Use "keep" '
            'or "offload"'
        )
    return training_weights or (None if wanted is not None else "keep")


def agree_on_plan(
    train: TrainBackend,
    rollout: RolloutBackend,
    topology: Topology,
    training_weights: str | None,
    bucket_bytes: int,
) -> ReshardPlan:
    """The plan between two backends that fit each other; where they do not on one rank, an error on all."""
    with together("no plan was made") as agreement:
        agreement.number = zlib.crc32(repr((training_weights, bucket_bytes)).encode())
        plan = _plan_between(train, rollout, topology, training_weights)
        check_bucket_bytes(bucket_bytes, plan.target)
    if not agreement.is_alike:
        raise BackendError(
            "the ranks were given different training_weights or bucket_bytes; this one has "
            f"{show(training_weights)} and "
            f"{bucket_bytes}: give all ranks the same"
        )
    lowest, highest = spread(plan.digest % HIGHEST, plan.digest % HIGHEST, None, local_device())
    if lowest != highest:
        raise BackendError(
            "the ranks have different plans: build their backends with the same model, topology and dtype, and set "
            "LOCAL_WORLD_SIZE alike on all"
        )
    return plan


def _plan_between(
    train: TrainBackend, rollout: RolloutBackend, topology: Topology, training_weights: str | None
) -> ReshardPlan:
    if not callable(getattr(train, "local_weights", None)):
        raise BackendError(f"train={show(train)}: give a training backend")
    if not callable(getattr(rollout, "weight_layout", None)):
        raise BackendError(f"rollout={show(rollout)}: give a rollout backend")
    check_kind(BackendError, "topology", topology, Topology, "a Topology")
    if not isinstance(rollout, SupportsWeightBuffers | SupportsShardLoading):
        raise BackendError(
            f"{type(rollout).__name__} neither exposes its weights (weight_buffers) nor loads shards (load_shards)"
        )
    if training_weights not in (None, "move", "keep", "offload"):
        raise BackendError(f'training_weights={show(training_weights)}: give "move", "keep", "offload" or None')
    source, target = train.weight_layout(), rollout.weight_layout()
    plan = plan_reshard(source, target, near=[_micro_dp(topology), _machines(topology.world_size)])
    if plan.ranks != tuple(range(topology.world_size)):
        raise BackendError(f"the two backends are on the ranks {plan.ranks}, the topology has {topology.world_size}")
    if training_weights == "move" and source.dtype != target.dtype:
        raise BackendError(
            f"training weights are {source.dtype}, generation weights {target.dtype}: the one cannot lie inside "
            'the other; use training_weights="keep" or "offload"'
        )
    if training_weights == "move" and not isinstance(rollout, SupportsWeightBuffers):
        raise BackendError(
            f"{type(rollout).__name__} keeps its weights itself: the training weights cannot lie inside them; use "
            'training_weights="keep" or "offload"'
        )
    _check_buffers(train, rollout)
    if isinstance(rollout, SupportsWeightBuffers):
        check_weights(target, dist.get_rank(), rollout.weight_buffers(), "generation")
        check_writable(as_parts(rollout.weight_buffers()), "the generation tensors, maybe another HybridEngine's,")
    return plan


@torch.no_grad()
def copy_buffers(train: TrainBackend, rollout: RolloutBackend) -> None:
    """Copies the state that no optimizer step changes into generation, each tensor in its own dtype."""
    found = train.buffers() if isinstance(train, SupportsBuffers) else {}
    if isinstance(rollout, SupportsBuffers):
        for name, buffer in rollout.buffers().items():
            buffer.copy_(found[name])
    elif found and isinstance(rollout, SupportsBufferLoading):
        rollout.load_buffers(found)


def _check_buffers(train: TrainBackend, rollout: RolloutBackend) -> None:
    if isinstance(rollout, SupportsBufferLoading):
        return  # its engine says which tensors it lacks, and which it has no place for
    has = [backend.buffers() if isinstance(backend, SupportsBuffers) else {} for backend in (train, rollout)]
    shapes = [{name: tuple(buffer.shape) for name, buffer in buffers.items()} for buffers in has]
    if differing := sorted(name for name in {*shapes[0], *shapes[1]} if shapes[0].get(name) != shapes[1].get(name)):
        raise ReshardError(
            f"the two backends hold other buffers, such as {show(differing[0])}: build both with the same model, and "
            "with backends that hold its buffers, such as fsdp and transformers"
        )


def _machines(world_size: int) -> Sequence[range]:
    """The ranks of every machine, as torchrun numbers them; one machine where nothing says how many ranks it has."""
    size = local_world_size(world_size)
    return [range(start, min(start + size, world_size)) for start in range(0, world_size, size)]


def _micro_dp(topology: Topology) -> Sequence[tuple[int, ...]]:
    return topology.groups("micro_dp") if topology.generation else ()


def build_transfer_group(plan: ReshardPlan, topology: Topology) -> dist.ProcessGroup | None:
    """The micro-DP group where all messages stay inside one (the paper's case), else all ranks."""
    groups = _micro_dp(topology)
    group_of = {rank: group for group in groups for rank in group}
    if not groups or any(
        group_of[message.source] != group_of[rank] for message in plan.messages for rank in message.destinations
    ):
        return None
    try:
        return build_groups(topology, "micro_dp")
    except RuntimeError as error:
        raise ReshardError(f"the micro-DP groups {groups} could not be connected: {error}") from error
