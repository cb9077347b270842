"""Identifies the engine of the server at a URL."""

from __future__ import annotations

from hf_engine.rollout.server._connection import ServerConnection
from hf_engine.rollout.server._dialect import Dialect
from hf_engine.rollout.server._sglang import SglangServer
from hf_engine.rollout.server._vllm import VllmServer
from hf_protocols.errors import BackendError

__all__ = ["identify"]


def identify(connection: ServerConnection, dtype: str) -> Dialect:
    """Asks the server what it is.

    Args:
        connection: to it.
        dtype: the model's, by torch's name.

    Raises:
        BackendError: for a server of another kind, or of a version that is not supported.
    """
    found = connection.ask("/version")
    if isinstance(found, dict) and "version" in found:
        return VllmServer(connection, found["version"], dtype)
    found = connection.ask("/server_info")
    if isinstance(found, dict) and "max_total_num_tokens" in found:
        return SglangServer(connection, found, dtype)
    raise BackendError(f"the server at {connection.url} is neither SGLang's nor vLLM's. Correct rollout.options.urls")
