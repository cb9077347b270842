"""Training with megatron-core: tensor, pipeline, data and expert parallelism, and a distributed optimizer.

The only importer of megatron-core. The same code runs on GPUs and, where there is none, on CPUs over gloo.
"""

from __future__ import annotations

from hf_engine.backends.megatron._backend import MegatronBackend

__all__ = ["MegatronBackend"]
