"""A single controller over SPMD worker groups, with direct worker-to-worker data flow.

What must not live here: models, losses, and the names of roles or of their columns.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_controller.executors.recovery import rebuild
from hf_controller.failures import Deadline, LostClusterError, RemoteCallError
from hf_controller.groups.resource_pool import ResourcePool, build_pools
from hf_controller.groups.worker import Connection, Worker, WorkerContext, WorkerSpec, as_pieces
from hf_controller.groups.worker_group import WorkerGroup, connect
from hf_controller.local_start import LocalCheck, check_local_start, choose_store_bytes, list_local_checks
from hf_controller.signals import Terminated
from hf_controller.trace import Span, SubSpan, Trace

if TYPE_CHECKING:
    from hf_controller.data.futures import BatchFuture, ListFuture, MetricsFuture, ObjectFuture
    from hf_controller.executors.base import Executor
    from hf_controller.executors.in_process import InProcessExecutor
    from hf_controller.executors.ray import RayExecutor
    from hf_controller.executors.tracing import TracedCall, TracedResult, TracingExecutor

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
    "choose_store_bytes",
    "connect",
    "list_local_checks",
    "rebuild",
]

# Loaded at first use: they take a second or more.
_LAZY = {
    "BatchFuture": "hf_controller.data.futures",
    "Executor": "hf_controller.executors.base",
    "InProcessExecutor": "hf_controller.executors.in_process",
    "ListFuture": "hf_controller.data.futures",
    "MetricsFuture": "hf_controller.data.futures",
    "ObjectFuture": "hf_controller.data.futures",
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
