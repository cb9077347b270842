"""The environment that SGLang's processes start in."""

from __future__ import annotations

import os

import torch

from hf_engine.cpu_support.sglang_plugins import PLATFORM
from hf_engine.rollout.sglang._plugins import OURS

__all__ = ["build_environment", "name_device"]

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def name_device(device: torch.device) -> str:
    """Returns the name by which every process of the machine knows a device of this one, or its number without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    number = device.index or 0
    return visible.split(",")[number].strip() if visible else str(number)


def build_environment(directory: str, *, tp_size: int, devices: list[str]) -> dict[str, str]:
    """The environment of an engine's processes.

    Args:
        directory: for their temporary files.
        tp_size: gen_tp_size.
        devices: names of the replica's ranks' CUDA devices, in their order.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    environment |= {OURS: "1", "TMPDIR": directory, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    # For the positions beyond the model's that SGLang keeps to itself.
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        return environment
    environment["SGLANG_PLATFORM"] = PLATFORM
    # Without it SGLang wants a NUMA node for every rank.
    cores = sorted(os.sched_getaffinity(0))
    environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(cores[i % len(cores)]) for i in range(tp_size)))
    return environment
