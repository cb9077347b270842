"""What placed pools take when a simulator, a device or a network is another: the layouts stay, the seconds change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hf_mapper.demand import ModelDemand
from hf_mapper.parallelism import ModelOption
from hf_mapper.planning import PlacedPool
from hf_mapper.scales import SIMULATORS, SimulatorScales
from hf_mapper.simulators.generation import simulate_rollout, simulate_transition
from hf_mapper.simulators.inference import simulate_inference
from hf_mapper.simulators.training import simulate_training
from hf_mapper.specs import ClusterSpec, WorkloadSpec

__all__ = ["Seconds", "price_pools", "stage_seconds", "total_seconds"]

Seconds = Mapping[str, NDArray[np.float64]]
"""For each simulator its seconds ``[pools, stages]``."""


def price_pools(
    pools: Sequence[PlacedPool], demands: Mapping[str, ModelDemand], cluster: ClusterSpec, workload: WorkloadSpec
) -> Seconds:
    """The seconds of each simulator's calls, by pool and stage, on the machines of ``cluster``."""
    parts = [
        [
            _price_model(demands[role], option, cluster.only(pool.option.request.machine), workload)
            for role, option in zip(pool.roles, pool.option.members, strict=True)
        ]
        for pool in pools
    ]
    return {
        name: np.array([np.sum([member[name] for member in members], axis=0) for members in parts])
        for name in SIMULATORS
    }


def stage_seconds(seconds: Seconds, scales: SimulatorScales | None = None) -> NDArray[np.float64]:
    """Seconds ``[pools, stages]`` of all simulators together, each times its factor."""
    scales = scales or SimulatorScales()
    scaled = np.array([getattr(scales, name) * seconds[name] for name in SIMULATORS], dtype=np.float64)
    total: NDArray[np.float64] = scaled.sum(axis=0)
    return total


def total_seconds(seconds: Seconds, scales: SimulatorScales | None = None) -> float:
    """Seconds of an iteration: of every stage the slowest pool's."""
    return float(stage_seconds(seconds, scales).max(axis=0).sum())


def _price_model(
    demand: ModelDemand, option: ModelOption, cluster: ClusterSpec, workload: WorkloadSpec
) -> dict[str, NDArray[np.float64]]:
    """Seconds in each stage: every call, and one transition in a stage that generates."""
    once = dict.fromkeys(SIMULATORS, 0.0)
    parallel, backend = option.parallel, option.backend
    if "training" in demand.kinds:
        once["training"] = simulate_training(demand.model, cluster, parallel, workload, backend=backend).latency_s
    if "inference" in demand.kinds:
        once["inference"] = simulate_inference(demand.model, cluster, parallel, workload, backend=backend).latency_s
    if option.generation is not None:
        layout, size = option.generation, parallel.world_size
        once["generation"] = simulate_rollout(
            demand.model, cluster, workload, world_size=size, generation=layout, num_waves=option.num_waves
        ).latency_s
        once["transition"] = simulate_transition(
            demand.model, cluster, parallel, workload, generation=layout, backend=backend
        ).latency_s
    counts = {name: [stage.count(name) for stage in demand.calls] for name in SIMULATORS}
    counts["transition"] = [int("generation" in stage) for stage in demand.calls]
    return {name: once[name] * np.array(counts[name], dtype=np.float64) for name in SIMULATORS}
