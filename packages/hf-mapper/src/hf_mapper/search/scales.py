"""Supposed errors of the simulators: factors on their results, to plan as if they were off by as much."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields

from hf_protocols import ConfigError
from hf_protocols.validation import show

__all__ = ["SIMULATORS", "SimulatorScales"]


@dataclass(frozen=True, kw_only=True)
class SimulatorScales:
    """Factors on the seconds of the simulators: the four kinds of work, rows between models, and offloaded models.

    Raises:
        ConfigError: for a factor that is not above 0.
    """

    training: float = 1.0
    inference: float = 1.0
    generation: float = 1.0
    transition: float = 1.0
    transfer: float = 1.0
    offload: float = 1.0

    def __post_init__(self) -> None:
        for name in SIMULATORS:
            factor = getattr(self, name)
            if not isinstance(factor, int | float) or not 0 < factor <= sys.float_info.max:
                raise ConfigError(f"scales: {name}={show(factor)} must be above 0")


SIMULATORS = tuple(field.name for field in fields(SimulatorScales))
"""The simulators whose answers are seconds."""
