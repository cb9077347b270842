"""The state of a training backend on disk: written from a staged copy, verified, and read under any layout.

What lives here: `state.json` and safetensors files of tensors, written and read with each backend's `StateParts`.
What must not: the arithmetic of layouts, and a backend's tensors. Nothing is unpickled here.

`records` are what callers see, `files` writes and verifies files, `description` is `state.json`, `generators` are
random numbers. `saving` and `loading` join them, and `backend` is a training backend's side.
"""

from __future__ import annotations

from hf_engine.training.state.files import list_written
from hf_engine.training.state.records import LoadedState, StateFile

__all__ = ["LoadedState", "StateFile", "list_written"]
