"""The fitted constants of one GPU kind with its software."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_protocols import ConfigError
from hf_protocols.validation import show

__all__ = ["EfficiencySpec"]

_PARTS = ("training_flops", "training_bandwidth", "generation_flops", "memory_bandwidth")
_COSTS = ("half_size", "training_latency_s", "layer_latency_s", "sequence_latency_s")


@dataclass(frozen=True, kw_only=True)
class EfficiencySpec:
    """Attained parts of peaks, and fixed costs: four constants of a training stack, four of an engine.

    Training, and the log-probabilities and values of the model that is trained: `training_flops` and
    `training_bandwidth` are attained parts of the peaks; `half_size`: a matrix multiplication takes twice its
    FLOPs' time where one dimension has this size, less where it is larger; `training_latency_s`: to launch one
    layer's kernels once, however small.

    Generation, of which the prefill is a part: `generation_flops` and `memory_bandwidth` are attained parts of the
    peaks; `layer_latency_s`: to launch one layer's kernels; `sequence_latency_s`: what a decode step adds for each
    sequence, on the host.

    Both: `fragmentation`, the part of memory that an allocator cannot hand out.

    Raises:
        ConfigError: for a part outside (0, 1], a fragmentation outside [0, 1), or a negative latency or size.
    """

    training_flops: float = 0.6
    training_bandwidth: float = 0.9
    half_size: float = 0.0
    training_latency_s: float = 2e-5
    generation_flops: float = 0.7
    memory_bandwidth: float = 0.9
    layer_latency_s: float = 2e-5
    sequence_latency_s: float = 0.0
    fragmentation: float = 0.1

    def __post_init__(self) -> None:
        for name in _PARTS:
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(
                    f"efficiency: {name}={show(getattr(self, name))} is a part of a peak: above 0, at most 1"
                )
        if not 0 <= self.fragmentation < 1:
            raise ConfigError(f"efficiency: fragmentation={show(self.fragmentation)} must be at least 0 and below 1")
        for name in _COSTS:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"efficiency: {name}={show(getattr(self, name))} must be at least 0")
