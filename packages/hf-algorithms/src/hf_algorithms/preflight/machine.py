"""Checks that this machine has the devices, the memory, the limits and the servers that a run needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_algorithms.preflight.reward_functions import check_servers
from hf_controller import check_local_start, choose_store_bytes
from hf_protocols import ConfigError, read_machine_limits
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_protocols import MappingPlan

__all__ = ["check_machine"]

_RANK_BYTES = 512 << 20
"""About what the process of a rank holds before its model: Python, torch and Ray. Seen: 0.3 to 0.4 GiB."""


def check_machine(config: Config, plan: MappingPlan) -> None:
    """Refuses a run that this machine cannot hold: devices, memory, room for a cluster, servers that score.

    A run on another cluster (`cluster.address`) is not checked.

    Raises:
        ConfigError: naming the key and the arithmetic.
    """
    if config.run.executor == "ray" and config.cluster.address != "local":
        return
    _check_devices(config, plan)
    memory_bytes = read_machine_limits().memory_bytes
    cache_bytes = config.rollout.options.get("cache_bytes")
    if config.cluster.gpu == "cpu" and isinstance(cache_bytes, int) and cache_bytes >= memory_bytes:
        raise ConfigError(
            f"rollout.options.cache_bytes = {show(cache_bytes)}: this machine has {memory_bytes} bytes of memory. "
            "Lower it"
        )
    check_servers(config)
    if config.run.executor == "ray":
        _check_memory(plan, memory_bytes)
        choose_store_bytes(config.cluster.object_store_bytes, key="cluster.object_store_bytes")
        check_local_start(sum(pool.num_slots for pool in plan.pools))


def _check_devices(config: Config, plan: MappingPlan) -> None:
    kinds = {pool.name: {machine.gpu_kind for machine in pool.machines} for pool in plan.pools}
    wanted = sum(pool.num_slots for pool in plan.pools if kinds[pool.name] != {"cpu"})
    if not wanted:
        return
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise ConfigError(
            f"cluster.gpu = {show(config.cluster.gpu)} needs a CUDA device, and none was found. "
            'Set cluster.gpu to "cpu", or install a CUDA build of torch'
        )
    if found < wanted:
        raise ConfigError(
            f"cluster.gpu = {show(config.cluster.gpu)}: the plan needs {wanted} CUDA devices, and this machine has "
            f"{found}. Lower cluster.gpus_per_machine, or set cluster.address"
        )


def _check_memory(plan: MappingPlan, memory_bytes: int) -> None:
    processes = sum(pool.num_slots for pool in plan.pools)
    needed = processes * _RANK_BYTES
    if needed > memory_bytes:
        ranks = " + ".join(f"{pool.num_slots} of {pool.name}" for pool in plan.pools)
        raise ConfigError(
            f"cluster.gpus_per_machine (--ranks of quickstart): {ranks} = {processes} processes of about "
            f"{_RANK_BYTES / 2**30:g} GiB need {needed / 2**30:g} GiB, and this machine has "
            f"{memory_bytes / 2**30:.1f} GiB. Lower it, or set cluster.address"
        )
