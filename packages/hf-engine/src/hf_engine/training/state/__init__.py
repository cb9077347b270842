"""The state of a training backend on disk: written from a staged copy, verified, and read under any layout.

A directory holds `state.json` and safetensors files with Hugging Face names in them. `records` are what callers see,
`files` writes and verifies files, `description` is `state.json`, `generators` are random numbers. `saving` and
`loading` join them with `StateParts`, which each backend has. No layout is computed and nothing is unpickled here.
"""

from __future__ import annotations

from hf_engine.training.state.files import list_written
from hf_engine.training.state.records import LoadedState, StateFile

__all__ = ["LoadedState", "StateFile", "list_written"]
