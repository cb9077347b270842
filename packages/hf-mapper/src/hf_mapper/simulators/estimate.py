"""The result of a simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hf_mapper.simulators.layouts import Figures
from hf_protocols import ParallelSpec

__all__ = ["Estimate", "build_estimate"]

Figure = TypeVar("Figure", float, NDArray[np.float64])


@dataclass(frozen=True, kw_only=True)
class Estimate(Generic[Figure]):
    """Time and memory of one call on one rank, the slowest and fullest: floats, or of B layouts arrays `[B]`.

    `memory_bytes` of a call is what it holds only while it runs (activations, KV cache, gathered weights); of
    `estimate_memory` it is the whole. `breakdown` splits what the estimate is about into its named parts:
    seconds for the calls (`*_s`), bytes for memory (`*_bytes`).
    """

    latency_s: Figure
    memory_bytes: Figure
    breakdown: Mapping[str, Figure] = field(default_factory=dict)


def build_estimate(
    parallel: ParallelSpec | Sequence[ParallelSpec],
    *,
    latency_s: Figures,
    memory_bytes: Figures,
    breakdown: Mapping[str, Figures],
) -> Estimate[Any]:
    """Floats for one layout; for several, every part as long as they are."""

    def answer(figure: Figures) -> Any:
        if isinstance(parallel, ParallelSpec):
            return float(figure)
        return np.broadcast_to(np.asarray(figure, dtype=np.float64), (len(parallel),))

    parts = {name: answer(part) for name, part in breakdown.items()}
    return Estimate(latency_s=answer(latency_s), memory_bytes=answer(memory_bytes), breakdown=parts)
