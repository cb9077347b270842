"""Stand-in for the model of a closed backend."""

from __future__ import annotations

from typing import NoReturn

from hf_protocols.errors import BackendError

__all__ = ["Closed"]


class Closed:
    """Object whose every use fails, with the message that the backend was closed."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BackendError("the backend was closed. Build another")
