"""SGLang itself: which versions are supported, and the environment that its processes start in."""

from __future__ import annotations

import os
from importlib import metadata

import torch

from hf_engine.backends.sglang._plugins import OURS, PLATFORM
from hf_protocols.errors import BackendError, BackendUnavailableError

__all__ = ["build_environment", "check_version"]

_OLDEST, _TOO_NEW = (0, 5, 23), (0, 5, 24)
_INSTALL = 'pip install "hf-engine[sglang]" on a machine with CUDA devices, scripts/env.sh sglang in a clone on any'
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def check_version() -> str:
    """The installed SGLang's version.

    Raises:
        BackendUnavailableError: without SGLang, with the line that installs it.
        BackendError: for a version that the sampler and the loader here were not made for.
    """
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise BackendUnavailableError(f"backend 'sglang' needs SGLang, which is not installed: {_INSTALL}") from None
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdecimal())
    if not _OLDEST <= numbers < _TOO_NEW:
        raise BackendError(f"backend 'sglang' supports SGLang >=0.5.23,<0.5.24 and {found} is installed: {_INSTALL}")
    return found


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
