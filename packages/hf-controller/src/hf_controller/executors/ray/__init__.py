"""Ray: the only part of this package that imports it.

What lives here: processes and slots, the path of a call and its batches, deadlines, and the reasons of failures. What
must not: code that the in-process executor needs too, and private names of Ray outside of `ray_internals`.
"""

from __future__ import annotations

from hf_controller.executors.ray.executor import RayExecutor

__all__ = ["RayExecutor"]
