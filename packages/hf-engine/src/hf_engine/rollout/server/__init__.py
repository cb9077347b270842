"""Generation by a server that runs elsewhere, SGLang's or vLLM's, over HTTP.

What lives here: the backend, the connection, and the dialects of both servers.
What must not: an import of either library, and what other engines need too, which is in `rollout`.
"""

from __future__ import annotations

from hf_engine.rollout.server._backend import ServerBackend

__all__ = ["ServerBackend"]
