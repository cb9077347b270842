"""vLLM's process groups, formed from our topology before vLLM would form its own from consecutive ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state

__all__ = ["SETTINGS", "GroupSettings", "current_tp_ranks", "destroy_groups", "form_groups", "unlink_sockets"]

SETTINGS = "hf_engine"
"""Key of the `GroupSettings` in vLLM's additional_config."""


@dataclass(frozen=True)
class GroupSettings:
    """What a worker needs to form its groups."""

    gen_tp: tuple[tuple[int, ...], ...]
    """Every tensor-parallel group, in the order of its ranks."""
    name: str
    """Names the engine's shared memory; another engine on this machine has another."""


def form_groups(vllm_config: Any, rank: int, local_rank: int, backend: str) -> None:
    """Builds every group that vLLM asks for, from the topology. Collective over all ranks.

    `ensure_model_parallel_initialized` accepts groups that are there, if their sizes are those of its config.
    """
    settings: GroupSettings = vllm_config.additional_config[SETTINGS]
    os.environ["VLLM_DIST_IDENT"] = settings.name
    alone = [[other] for other in range(dist.get_world_size())]
    with set_current_vllm_config(vllm_config):
        parallel_state.set_custom_all_reduce(not vllm_config.parallel_config.disable_custom_all_reduce)
        parallel_state.init_distributed_environment(
            vllm_config.parallel_config.world_size, rank, "env://", local_rank, backend
        )
        parallel_state._TP = parallel_state._ETP = _build(settings.gen_tp, local_rank, backend, "tp", broadcasts=True)
        _unlink_shared_memory(settings.name)
        for name in ("dcp", "pcp", "pp", "dp"):
            setattr(parallel_state, f"_{name.upper()}", _build(alone, local_rank, backend, name))
        if vllm_config.model_config.is_moe:
            parallel_state._EP = _build(settings.gen_tp, local_rank, backend, "ep")


def current_tp_ranks() -> tuple[int, ...]:
    """Global ranks of the tensor-parallel group that vLLM uses in this process."""
    return tuple(parallel_state.get_tp_group().ranks)


def destroy_groups() -> None:
    """Ends the groups of `form_groups`, whole or in part; the default group stays the caller's."""
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = parallel_state._NODE_COUNT = None


def unlink_sockets() -> None:
    """Takes the names of the sockets that this rank's group talks through, once all of it is connected: vLLM leaves
    them behind.
    """
    queue = parallel_state.get_tp_group().mq_broadcaster
    if queue is None or not queue._is_writer:
        return
    for address in (queue.handle.local_subscribe_addr, queue.handle.local_notify_addr):
        if address is not None:
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def _unlink_shared_memory(name: str) -> None:
    """Takes the names of this rank's group from the shared memory that all of the group have open by now: a process
    that is killed would leave them behind.
    """
    members = f"[{'-'.join(map(str, parallel_state._TP.ranks))}]"
    for path in Path("/dev/shm").glob(f"{name}-*"):
        if members in path.name:
            path.unlink(missing_ok=True)


def _build(groups: Sequence[Sequence[int]], local_rank: int, backend: str, name: str, broadcasts: bool = False) -> Any:
    return parallel_state.init_model_parallel_group(
        [list(group) for group in groups],
        local_rank,
        backend,
        use_message_queue_broadcaster=broadcasts,
        group_name=name,
    )
