"""Analytic simulators: pure functions of (model, cluster, parallel, workload); the cluster has one kind of machine.

What lives here: formulas of one call's seconds and bytes. What must not: comparisons of layouts, reading of
measurements, and knowledge of pools. Training and inference are bound by arithmetic, generation by memory (paper,
Appendix C); the attained parts of the peaks are the `EfficiencySpec` of the accelerator.
"""

from __future__ import annotations

from hf_mapper.simulators.estimate import Estimate
from hf_mapper.simulators.generation import simulate_generation
from hf_mapper.simulators.inference import simulate_inference
from hf_mapper.simulators.memory import estimate_memory
from hf_mapper.simulators.training import simulate_training

__all__ = ["Estimate", "estimate_memory", "simulate_generation", "simulate_inference", "simulate_training"]
