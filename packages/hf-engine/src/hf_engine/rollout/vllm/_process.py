"""Starts and ends of vLLM inside a rank, whose garbage collector is the rank's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_engine.rollout.vllm._core import _LazyRegisteredModel, _ModelInfo, core, gpu_worker
from hf_engine.rollout.vllm._library import replaced

__all__ = ["collector_kept", "started_here"]


@contextmanager
def started_here() -> Iterator[None]:
    """Starts an engine without a second program, and without freezing the rank's heap.

    vLLM imports the class of a model that is new to the machine in a program of its own, to keep CUDA out of its
    process. A rank has initialized CUDA, and needs the class. vLLM also freezes the heap after its start. Garbage of
    training would stay, and the end of the engine would collect among all imported modules.
    """
    with (
        replaced(_LazyRegisteredModel, "inspect_model_cls", _inspect),
        replaced(core, "freeze_gc_heap", lambda: None),
        replaced(gpu_worker, "freeze_gc_heap", lambda: None),
    ):
        yield


@contextmanager
def collector_kept() -> Iterator[None]:
    """Ends an engine without vLLM's `gc.unfreeze`: the rank froze what is frozen."""
    with replaced(gc, "unfreeze", lambda: None):
        yield


def _inspect(model: Any) -> Any:
    return _ModelInfo.from_model_cls(model.load_model_cls())
