"""vLLM's process groups, formed from our topology before vLLM would form its own from consecutive ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hf_engine.process_groups import wait_for_connections
from hf_engine.rollout.vllm._core import current_platform, parallel_state, set_current_vllm_config

__all__ = ["GROUPS", "current_tp_ranks", "destroy_groups", "form_groups"]

GROUPS = "hf_engine_gen_tp_groups"
"""Key of the tensor-parallel groups, each in the order of its ranks, in vLLM's additional_config."""


def form_groups(vllm_config: Any, rank: int, local_rank: int, backend: str) -> None:
    """Builds every group that vLLM asks for, from the topology. Collective over all ranks.

    `ensure_model_parallel_initialized` accepts groups that are there, if their sizes are those of its config.
    """
    gen_tp: Sequence[Sequence[int]] = vllm_config.additional_config[GROUPS]
    alone = [[other] for other in range(dist.get_world_size())]
    with set_current_vllm_config(vllm_config):
        parallel_state.set_custom_all_reduce(not vllm_config.parallel_config.disable_custom_all_reduce)
        parallel_state.init_distributed_environment(
            vllm_config.parallel_config.world_size, rank, "env://", local_rank, backend
        )
        # On a CPU vLLM lets a group "tp" spin in shared memory, for ever if a peer has died. For a group with another
        # name it uses the collectives of torch.distributed, which have a deadline.
        name = "gen_tp" if current_platform.is_cpu() else "tp"
        parallel_state._TP = parallel_state._ETP = _build(gen_tp, local_rank, backend, name)
        for name in ("dcp", "pcp", "pp", "dp"):
            setattr(parallel_state, f"_{name.upper()}", _build(alone, local_rank, backend, name))
        if vllm_config.model_config.is_moe:
            parallel_state._EP = _build(gen_tp, local_rank, backend, "ep")
    wait_for_connections()


def current_tp_ranks() -> tuple[int, ...]:
    """Global ranks of the tensor-parallel group that vLLM uses in this process."""
    return tuple(parallel_state.get_tp_group().ranks)


def destroy_groups() -> None:
    """Ends the groups of `form_groups`, whole or in part; the default group stays the caller's."""
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = parallel_state._NODE_COUNT = None


def _build(groups: Sequence[Sequence[int]], local_rank: int, backend: str, name: str) -> Any:
    # Objects are not broadcast in these groups, so they need none of vLLM's queues, which wait without a deadline.
    return parallel_state.init_model_parallel_group(
        [list(group) for group in groups], local_rank, backend, use_message_queue_broadcaster=False, group_name=name
    )
