"""Ray: the only part of this package that imports it."""

from __future__ import annotations

from hf_controller.executors.ray.executor import RayExecutor

__all__ = ["RayExecutor"]
