"""Price placed pools again under another simulator, device or network: layouts stay, seconds change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hf_mapper.search.demand import ModelDemand
from hf_mapper.search.movement import offload_stage_s, transfer_stage_s
from hf_mapper.search.parallelism import ModelOption
from hf_mapper.search.planning import PoolPlacement
from hf_mapper.search.scales import SIMULATORS, SimulatorScales
from hf_mapper.simulators.generation import simulate_generation
from hf_mapper.simulators.inference import simulate_inference
from hf_mapper.simulators.training import simulate_training
from hf_mapper.specs import ClusterSpec, WorkloadSpec

__all__ = ["Seconds", "price_pools", "stage_seconds", "total_seconds"]

Seconds = Mapping[str, NDArray[np.float64]]
"""For each simulator its seconds `[pools, stages]`."""


def price_pools(
    pools: Sequence[PoolPlacement], demands: Mapping[str, ModelDemand], cluster: ClusterSpec, workload: WorkloadSpec
) -> Seconds:
    """The seconds of each simulator's calls, by pool and stage, on the machines of `cluster`."""
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
    """Seconds `[pools, stages]` of all simulators together, each times its factor."""
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
    """Seconds in each stage: every call, one transition in a stage that generates, and what is moved for them."""
    once = dict.fromkeys(("training", "inference", "generation", "transition"), 0.0)
    parallel, backend = option.parallel, option.backend
    if "training" in demand.kinds:
        once["training"] = simulate_training(demand.model, cluster, parallel, workload, backend=backend).latency_s
    if "inference" in demand.kinds:
        once["inference"] = simulate_inference(demand.model, cluster, parallel, workload, backend=backend).latency_s
    if option.generation is not None:
        parts = simulate_generation(
            demand.model, cluster, parallel, workload,
            generation=option.generation, num_waves=option.num_waves, backend=backend,
        ).breakdown  # fmt: skip
        once["transition"] = parts["transition_s"]
        once["generation"] = parts["prefill_s"] + parts["decode_s"]
    moved = {
        "transfer": transfer_stage_s(demand, cluster, parallel, option.generation),
        "offload": offload_stage_s(demand, cluster, workload, option.host_bytes),
    }
    called = {name: seconds * np.array(demand.count(name), dtype=np.float64) for name, seconds in once.items()}
    return called | {name: np.array(seconds, dtype=np.float64) for name, seconds in moved.items()}
