"""The state of a training backend on disk: written from a staged copy, verified, and read under any layout.

A directory holds `state.json` and safetensors files with Hugging Face names in them. `files` writes and verifies files,
`description` is `state.json`, `generators` are random numbers. `saving` and `loading` join them with `StateParts`,
which each backend has. No layout is computed and nothing is unpickled here.
"""

from __future__ import annotations

from hf_engine.training.state.description import SCHEMA, StateDescription
from hf_engine.training.state.files import StateFile
from hf_engine.training.state.loading import LoadedState, load_parts
from hf_engine.training.state.parts import StateParts, StateProgress, StoredPiece
from hf_engine.training.state.saving import StateWriter

__all__ = [
    "SCHEMA",
    "LoadedState",
    "StateDescription",
    "StateFile",
    "StateParts",
    "StateProgress",
    "StateWriter",
    "StoredPiece",
    "load_parts",
]
