"""What a simulator answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Estimate"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time and memory of one call on one rank, the slowest and fullest.

    ``memory_bytes`` of a call is what it holds only while it runs (activations, KV cache, gathered weights); of
    ``estimate_memory`` it is the whole. ``breakdown`` splits what the estimate is about into its named parts:
    seconds for the calls (``*_s``), bytes for memory (``*_bytes``).
    """

    latency_s: float
    memory_bytes: float
    breakdown: Mapping[str, float] = field(default_factory=dict)
