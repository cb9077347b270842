"""Generation with vLLM inside the training ranks: groups from our topology, weights as shards, draws as everywhere.

What lives here: the backend and the only imports of vLLM.
What must not: what other engines need too, which is in `rollout`, and what a CPU needs, which is in `cpu_support`.
"""

from __future__ import annotations

from hf_engine.rollout.vllm._backend import VllmBackend

__all__ = ["VllmBackend"]
