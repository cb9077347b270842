"""Environment of a training rank as vLLM needs it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["embedded", "options_set", "replaced", "serving_threads"]


@contextmanager
def options_set() -> Iterator[None]:
    """Sets the variables that vLLM reads while it runs; restores them when the block ends.

    One process, its own threads, and the model runner that takes custom logits processors.
    """
    options = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    with _environment(options | {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}):
        yield


@contextmanager
def embedded() -> Iterator[None]:
    """Starts an engine inside a rank: vLLM sees a launched rank, and the rank finds its own state untouched.

    vLLM reads the rank from the environment, seeds the global random generators, and replaces
    `torch.set_num_threads` by a warning.
    """
    rank = dist.get_rank()
    own = str(torch.cuda.current_device() if torch.cuda.is_available() else rank)
    local_rank = os.environ.get("LOCAL_RANK", own)
    launched = {"RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": local_rank}
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    random_state, devices = random.getstate(), range(torch.cuda.device_count())
    try:
        with _environment(launched), options_set(), torch.random.fork_rng(devices=devices), _numpy_state():
            yield
    finally:
        random.setstate(random_state)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


_SET_BY_VLLM = ("VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for a block; afterwards they are as before, those included that vLLM sets itself."""
    before = {name: os.environ.get(name) for name in (*values, *_SET_BY_VLLM)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def serving_threads() -> Iterator[None]:
    """One thread on a CPU while vLLM generates, unless OMP_NUM_THREADS is set: vLLM's own rule, whose setting of
    threads `embedded` undoes. Between its small operations more threads would only wait, on cores that others need.
    """
    num_threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute another value for a block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _numpy_state() -> Iterator[None]:
    import numpy as np

    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)
