"""Generation with SGLang in a process of its own next to training ranks. This folder is the only importer of SGLang.

SGLang's processes import the modules below on their way up, so nothing is imported here before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_engine.backends.sglang._backend import SglangBackend

__all__ = ["SglangBackend"]


def __getattr__(name: str) -> Any:
    if name == "SglangBackend":
        from hf_engine.backends.sglang._backend import SglangBackend

        return SglangBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
