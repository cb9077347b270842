"""Ray: the only part of this package that imports it.

What lives here: processes and slots, the way of a call and its batches, deadlines, and why something failed.
What must not: what the executor in one process needs too, and private names of Ray outside of `ray_internals`.
"""

from __future__ import annotations

from hf_controller.executors.ray.executor import RayExecutor

__all__ = ["RayExecutor"]
