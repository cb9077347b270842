"""A local Ray cluster of one's own, or an explicit foreign one."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import ray
from ray.util.debug import log_once

from hf_protocols import PoolError

__all__ = ["start_cluster", "stop_cluster"]


def start_cluster(*, address: str, num_cpus: int | None, object_store_bytes: int, log_to_driver: bool) -> None:
    """Start a cluster on this machine (``address="local"``), or join the one at ``address``.

    Raises:
        PoolError: if Ray already runs in this process.
    """
    if ray.is_initialized():
        raise PoolError("Ray already runs in this process: close the other executor, or call ray.shutdown() first")
    # Ray's hook for `uv run` would ship the tree and start every worker through uv.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # Lines that many ranks print alike are printed once, without Ray's hint of how to change that.
    log_once("log_dedup_warning")
    options: dict[str, Any] = {"log_to_driver": log_to_driver, "logging_level": logging.ERROR}
    if address == "local":
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            _system_config={"prestart_worker_first_driver": False, "enable_worker_prestart": False},
            **options,
        )
    else:
        ray.init(address=address, **options)


def stop_cluster() -> None:
    """Leave the cluster; one that was started here ends with all its processes."""
    ray.shutdown()
