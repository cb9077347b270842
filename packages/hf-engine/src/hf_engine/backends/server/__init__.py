"""Generation by a server that runs elsewhere, SGLang's or vLLM's, over HTTP. Imports neither library."""

from __future__ import annotations

from hf_engine.backends.server._backend import ServerBackend

__all__ = ["ServerBackend"]
