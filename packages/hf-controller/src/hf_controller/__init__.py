"""A single controller over SPMD worker groups, with direct worker-to-worker data flow.

`hf` stands for HybridFlow, not Hugging Face.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_controller.connection import Connection, connect
from hf_controller.failures import Deadline, LostClusterError, RemoteCallError
from hf_controller.local_start import LocalCheck, check_local_start, list_local_checks
from hf_controller.recovery import rebuild
from hf_controller.resource_pool import ResourcePool, build_pools
from hf_controller.signals import Terminated
from hf_controller.trace import Span, SubSpan, Trace
from hf_controller.worker import Worker, WorkerContext, WorkerSpec, as_pieces
from hf_controller.worker_group import WorkerGroup

if TYPE_CHECKING:
    from hf_controller.executors.base import Executor
    from hf_controller.executors.in_process import InProcessExecutor
    from hf_controller.executors.ray import RayExecutor
    from hf_controller.executors.tracing import TracedCall, TracedResult, TracingExecutor
    from hf_controller.futures import BatchFuture, ListFuture, MetricsFuture, ObjectFuture

__all__ = [
    "BatchFuture",
    "Connection",
    "Deadline",
    "Executor",
    "InProcessExecutor",
    "ListFuture",
    "LocalCheck",
    "LostClusterError",
    "MetricsFuture",
    "ObjectFuture",
    "RayExecutor",
    "RemoteCallError",
    "ResourcePool",
    "Span",
    "SubSpan",
    "Terminated",
    "Trace",
    "TracedCall",
    "TracedResult",
    "TracingExecutor",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "WorkerSpec",
    "as_pieces",
    "build_pools",
    "check_local_start",
    "connect",
    "list_local_checks",
    "rebuild",
]

# Loaded at first use: they take a second or more.
_LAZY = {
    "BatchFuture": "hf_controller.futures",
    "Executor": "hf_controller.executors.base",
    "InProcessExecutor": "hf_controller.executors.in_process",
    "ListFuture": "hf_controller.futures",
    "MetricsFuture": "hf_controller.futures",
    "ObjectFuture": "hf_controller.futures",
    "RayExecutor": "hf_controller.executors.ray",
    "TracedCall": "hf_controller.executors.tracing",
    "TracedResult": "hf_controller.executors.tracing",
    "TracingExecutor": "hf_controller.executors.tracing",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
