"""Generation with SGLang in a process of its own next to training ranks.

What lives here: the backend, its process, and the only imports of SGLang.
What must not: what other engines need too, which is in `rollout`, and what a CPU needs, which is in `cpu_support`.

SGLang's processes import these modules on their way up, so nothing is imported here before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_engine.rollout.sglang._backend import SglangBackend

__all__ = ["SglangBackend"]


def __getattr__(name: str) -> Any:
    if name == "SglangBackend":
        from hf_engine.rollout.sglang._backend import SglangBackend

        return SglangBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
