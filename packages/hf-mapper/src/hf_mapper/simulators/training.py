"""Updates of a trained model: forward, backward and optimizer over every mini-batch.

Gradients are reduced once per update, not overlapped; where FSDP scatters them, that is part of the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from hf_mapper.simulators.communication import all_gather_s, all_reduce_s, build_link
from hf_mapper.simulators.estimate import Estimate, build_estimate
from hf_mapper.simulators.layouts import Figures, Layouts, Sizes, check_layouts, read_layouts
from hf_mapper.simulators.memory import (
    computed_parameters,
    expert_parameters,
    state_bytes,
    trained_parameters,
    training_work_bytes,
)
from hf_mapper.simulators.passes import simulate_passes
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import ModelShape, ParallelSpec

__all__ = ["simulate_training"]


@overload
def simulate_training(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec,
    workload: WorkloadSpec,
    *,
    backend: str | None = None,
) -> Estimate[float]: ...
@overload
def simulate_training(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: Sequence[ParallelSpec],
    workload: WorkloadSpec,
    *,
    backend: str | Sequence[str] | None = None,
) -> Estimate[NDArray[np.float64]]: ...
def simulate_training(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec | Sequence[ParallelSpec],
    workload: WorkloadSpec,
    *,
    backend: str | Sequence[str] | None = None,
) -> Estimate[Any]:
    """All the updates of one iteration: `epochs * mini_batches` of them; of typical sequences where lengths vary."""
    layouts = read_layouts(model, parallel, backend)
    sequences = workload.mini_batch_sequences
    check_layouts(model, layouts, cluster, chunks=workload.pipeline_chunks, sequences=sequences)
    work_bytes = training_work_bytes(model, layouts, workload)
    workload = workload.typical
    updates = workload.epochs * workload.mini_batches
    local = sequences // layouts.dp_size
    once = simulate_passes(model, cluster, layouts, workload, local, trains=True)
    once["gradient_sync_s"] = _gradient_sync_s(model, cluster, layouts, workload)
    once["optimizer_s"] = _optimizer_s(model, cluster, layouts, workload)
    parts = {name: updates * part for name, part in once.items()}
    return build_estimate(parallel, latency_s=sum(parts.values()), memory_bytes=work_bytes, breakdown=parts)


def _gradient_sync_s(model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec) -> Figures:
    """Megatron: scatter the summed gradients and gather new weights, or all-reduce where no optimizer is sharded.

    Experts that are spread have fewer copies, and are summed apart.
    """
    spread = layouts.ep_size
    apart = np.where(spread > 1, expert_parameters(model) / spread / layouts.num_parts, 0.0)
    sync_s = _sync_s(cluster, layouts, workload, 1, computed_parameters(model, layouts) - apart)
    sync_s += np.where(spread > 1, _sync_s(cluster, layouts, workload, spread, apart), 0.0)
    return np.where(layouts.fsdp, 0.0, sync_s)


def _sync_s(
    cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec, spread: Sizes, parameters: Figures
) -> Figures:
    """Of `parameters` per rank that every `spread`-th data-parallel rank has as well."""
    copies, stride = layouts.dp_size // spread, layouts.tp_size * spread
    link = build_link(cluster, num_ranks=copies, stride=stride, world_size=layouts.world_size)
    gradients = workload.software.gradient_bytes * parameters
    if not workload.software.distributed_optimizer:
        return all_reduce_s(link, gradients)
    return all_gather_s(link, gradients) + all_gather_s(link, workload.element_bytes * parameters)


def _optimizer_s(model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec) -> Figures:
    """Adam reads the gradient and reads and writes its state and the weights, at the memory's speed."""
    gpu = cluster.machine.gpu
    state = state_bytes(model, layouts, workload, trained=True)
    share = 1.0 if workload.adapters is None else trained_parameters(model, workload) / model.num_parameters
    moved = 2 * state["optimizer_bytes"] + (state["gradient_bytes"] + 2 * share * state["weight_bytes"])
    return moved / (gpu.memory_bandwidth_bytes_per_s * gpu.efficiency.training_bandwidth)
