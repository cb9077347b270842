"""Training with megatron-core: tensor, pipeline, data and expert parallelism, and a distributed optimizer.

What lives here: the backend and the only imports of megatron-core; the same code runs on GPUs and on CPUs over gloo.
What must not: what fsdp needs too, which is in `training`, and what a CPU needs, which is in `cpu_support`.
"""

from __future__ import annotations

from hf_engine.training.megatron._backend import MegatronBackend

__all__ = ["MegatronBackend"]
