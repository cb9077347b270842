"""Training with FSDP2: parameters sharded on dimension 0 over all ranks, on CPUs over gloo and on GPUs over NCCL.

What lives here: the backend, its models and state, trained adapters, shared prompts and their masks.
What must not: what megatron needs too, which is in `training`, and how models are read, which is in `models`.
"""

from __future__ import annotations

from hf_engine.training.fsdp._backend import FsdpBackend
from hf_engine.training.fsdp._lora import AdaptedFsdpBackend

__all__ = ["AdaptedFsdpBackend", "FsdpBackend"]
