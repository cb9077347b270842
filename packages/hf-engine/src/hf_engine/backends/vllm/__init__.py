"""Generation with vLLM inside the training ranks: groups from our topology, weights as shards, draws as everywhere.

This folder is the only importer of vLLM.
"""

from __future__ import annotations

from hf_engine.backends.vllm._backend import VllmBackend

__all__ = ["VllmBackend"]
