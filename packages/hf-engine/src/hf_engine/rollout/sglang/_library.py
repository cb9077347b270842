"""The environment that SGLang's processes start in."""

from __future__ import annotations

import os

import torch

from hf_engine.cpu_support.sglang_plugins import PLATFORM
from hf_engine.rollout.sglang._plugins import OURS

__all__ = ["build_environment"]

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def build_environment(directory: str, *, tp_size: int, devices: list[int]) -> dict[str, str]:
    """The environment of an engine's processes.

    Args:
        directory: for their temporary files.
        tp_size: gen_tp_size.
        devices: CUDA devices of the replica's ranks, in their order.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    environment |= {OURS: "1", "TMPDIR": directory, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    # For the positions beyond the model's that SGLang keeps to itself.
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(device) for device in range(torch.cuda.device_count())]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[device] for device in devices)
        return environment
    environment["SGLANG_PLATFORM"] = PLATFORM
    # Without it SGLang wants a NUMA node for every rank.
    cores = sorted(os.sched_getaffinity(0))
    environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(cores[i % len(cores)]) for i in range(tp_size)))
    return environment
