"""megatron-core's process groups, made from a Topology and shared by the backends of one process."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist

from hf_engine.process_groups import default_timeout, keeping_random_numbers, wait_for_connections
from hf_engine.training.megatron._core import model_parallel_cuda_manual_seed, parallel_state
from hf_protocols.errors import BackendError, TopologyError
from hf_protocols.topology import Axis, Coordinate, Order, ParallelSpec, Topology

__all__ = ["ParallelGroups", "check_sizes"]

_ORDERS: dict[Order, str] = {"megatron": "tp-cp-ep-dp-pp", "contiguous": "tp-cp-ep-pp-dp"}


@dataclass(kw_only=True)
class _Shared:
    """megatron-core keeps one layout per process in global variables: its users."""

    layout: str | None = None
    num_users: int = 0


_SHARED = _Shared()


class ParallelGroups:
    """The groups that this rank is in. Collective over all ranks, as is `close`.

    Backends of the same layout share them (actor, reference and critic in one process); the last `close` gives them
    back, and another layout may follow.

    Raises:
        BackendError: for context parallelism, which the backend's attention lacks, for an unsupported order of
            ranks, or while backends of another layout are open in this process.
        TopologyError: if the default process group has another number of ranks.
    """

    def __init__(self, topology: Topology, *, seed: int) -> None:
        _check_supported(topology)
        self.topology = topology
        self.seed = seed
        self.rank = dist.get_rank()
        self.at: Coordinate = topology.coordinate(self.rank)
        layout = f"{topology.train} in {topology.order} order"
        if _SHARED.num_users and _SHARED.layout != layout:
            raise BackendError(
                f"megatron-core keeps one layout in a process: this one holds models in {_SHARED.layout}, and {layout} "
                "was asked for. Close them first, or use other processes"
            )
        if not _SHARED.num_users:
            _initialize(topology, seed)
            _SHARED.layout = layout
        _SHARED.num_users += 1
        self.tp: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        self.pp: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
        self.dp: dist.ProcessGroup = parallel_state.get_data_parallel_group()
        self.expert_dp: dist.ProcessGroup = parallel_state.get_expert_data_parallel_group()
        self._open = True

    @cached_property
    def replicas(self) -> tuple[int, ...] | None:
        """For every rank the number of its data-parallel replica; None where every rank is one."""
        topology = self.topology
        if topology.train.dp_size == topology.world_size:
            return None
        return tuple(topology.coordinate(rank).dp for rank in range(topology.world_size))

    @property
    def is_first_stage(self) -> bool:
        """True if this rank embeds tokens."""
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank computes outputs."""
        return self.at.pp == self.topology.train.pp_size - 1

    @property
    def last_stage_rank(self) -> int:
        """The global rank of this pipeline's last stage."""
        return self.topology.group_of("pp", self.rank)[-1]

    def close(self) -> None:
        """Gives the groups back; they are destroyed with their last user."""
        if not self._open:
            return
        self._open = False
        del self.tp, self.pp, self.dp, self.expert_dp
        _SHARED.num_users -= 1
        if not _SHARED.num_users:
            _SHARED.layout = None
            _destroy()


def check_sizes(train: ParallelSpec) -> None:
    """Refuses context parallelism.

    Raises:
        BackendError: with the sizes to use instead.
    """
    if train.cp_size > 1:
        raise BackendError(
            f"the megatron backend has no context parallelism, got cp_size={train.cp_size}. Use cp_size=1 and more "
            "tensor or pipeline parallelism"
        )


def _check_supported(topology: Topology) -> None:
    train = topology.train
    check_sizes(train)
    if topology.order == "contiguous" and train.ep_size > 1 and train.pp_size > 1:
        raise BackendError(
            f"megatron-core numbers experts and pipeline stages together only with order='megatron', got "
            f"order='contiguous' with pp_size={train.pp_size} and ep_size={train.ep_size}"
        )
    if dist.get_world_size() != topology.world_size:
        raise TopologyError(
            f"the topology has {topology.world_size} ranks, the default process group {dist.get_world_size()}. "
            "Start as many processes as the topology names"
        )


def _initialize(topology: Topology, seed: int) -> None:
    if parallel_state.model_parallel_is_initialized():
        raise BackendError("megatron-core was initialized in this process by other code; the backend needs its own")
    train = topology.train
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=train.tp_size,
        pipeline_model_parallel_size=train.pp_size,
        expert_model_parallel_size=train.ep_size,
        order=_ORDERS[topology.order],
        create_gloo_process_groups=False,
        distributed_timeout_minutes=default_timeout().total_seconds() / 60,
    )
    wait_for_connections()
    _check_groups(topology)
    with keeping_random_numbers():
        model_parallel_cuda_manual_seed(seed)


def _check_groups(topology: Topology) -> None:
    """megatron-core and hf_protocols must mean the same ranks by the same axis."""
    found: dict[Axis, Any] = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
    }
    for axis, group in found.items():
        ranks = tuple(dist.get_process_group_ranks(group))
        wanted = topology.group_of(axis, dist.get_rank())
        assert ranks == wanted, f"{axis} group of rank {dist.get_rank()}: megatron-core {ranks}, topology {wanted}"


def _destroy() -> None:
    groups = [group for group in parallel_state._global_process_group_list or () if group is not None]
    parallel_state.destroy_model_parallel()
    while groups:
        dist.destroy_process_group(groups.pop())
    # Cycles inside megatron-core hold the groups, and each holds a thread, which under gloo polls.
    gc.collect()
