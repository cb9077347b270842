"""Updates of a trained model: forward, backward and optimizer over every mini-batch.

A backward pass costs two forwards; full recompute repeats every layer's forward, selective recompute the core of
attention, or where that is fused every second multiplication. Kernels run behind their launches: whichever takes longer
sets the pace, and where they are close both do. The pipeline runs 1F1B: every micro-batch at the pace of the slowest
stage, the last, which has the logits; and a bubble of pp - 1 micro-batches, divided by the chunks of an interleaved
schedule. Gradients are reduced once per update, not overlapped; FSDP gathers a layer's weights for forward and for
backward and scatters its gradients behind computing, which they slow down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from hf_mapper.simulators.communication import (
    all_gather_s,
    all_reduce_s,
    build_link,
    build_stage_link,
    expert_exchange_s,
    point_to_point_s,
)
from hf_mapper.simulators.estimate import Estimate, build_estimate
from hf_mapper.simulators.layers import compute_layer_times, compute_logits_s
from hf_mapper.simulators.layouts import Figures, Layouts, Sizes, read_layouts
from hf_mapper.simulators.memory import (
    computed_parameters,
    expert_parameters,
    fsdp_weight_bytes,
    micro_batch_sequences,
    state_bytes,
    training_work_bytes,
)
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import ModelShape, ParallelSpec

__all__ = ["simulate_training"]

_SHARPNESS = 3.0
"""Order of the mean that joins kernels and launches: infinity would be their maximum."""

_EXPOSED_GATHERS = 0.6
"""What FSDP's transfers add to computing even where it hides them: they run kernels and use memory of their own."""

_RECOMPUTED_LAYERS = {"none": 0.0, "selective": 0.5, "full": 1.0}
"""Part of a layer's kernels that recompute launches again."""


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
    """All the updates of one iteration: ``epochs * mini_batches`` of them; of typical sequences where lengths vary."""
    layouts = read_layouts(model, parallel, backend)
    work_bytes = training_work_bytes(model, layouts, workload)
    workload = workload.typical
    updates = workload.epochs * workload.mini_batches
    local = workload.mini_batch_sequences // layouts.dp_size
    sequences = micro_batch_sequences(workload, local)
    micro_batches = local / sequences
    # Each micro-batch at the pace of the last stage, and the others' part of filling and draining the pipeline.
    passes = micro_batches + (layouts.pp_size - 1) / workload.pipeline_chunks
    compute_s = _stage_compute_s(model, cluster, layouts, workload, sequences)
    logits_s = compute_logits_s(model, cluster.machine.gpu, workload, sequences=sequences, tp_size=layouts.tp_size)
    exchange_s = _expert_parallel_s(model, cluster, layouts, workload, sequences)
    parts: dict[str, Figures] = {
        "compute_s": updates * passes * compute_s,
        "logits_s": updates * micro_batches * logits_s,
        "tensor_parallel_s": updates * passes * _tensor_parallel_s(model, cluster, layouts, workload, sequences),
        "expert_parallel_s": updates * passes * exchange_s,
        "pipeline_hop_s": updates * passes * _hops_s(model, cluster, layouts, workload, sequences),
        "gradient_sync_s": updates * _gradient_sync_s(model, cluster, layouts, workload),
        "optimizer_s": updates * _optimizer_s(model, cluster, layouts, workload),
    }
    gathers = 1 if workload.software.gathers == "model" else micro_batches
    gather_s = updates * gathers * _gather_s(model, cluster, layouts, workload)
    computing_s = parts["compute_s"] + parts["logits_s"]
    parts["exposed_gather_s"] = np.maximum(_EXPOSED_GATHERS * gather_s, gather_s - computing_s)
    return build_estimate(parallel, latency_s=sum(parts.values()), memory_bytes=work_bytes, breakdown=parts)


def _stage_compute_s(
    model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec, sequences: Sizes
) -> Figures:
    """One micro-batch, forward and backward, through the layers of one pipeline stage."""
    gpu = cluster.machine.gpu
    once = compute_layer_times(
        model, gpu, workload, sequences=sequences, tp_size=layouts.tp_size, ep_size=layouts.ep_size
    )
    kernels_s = 3 * (once.linear_s + once.core_s)
    if workload.recompute == "full":
        kernels_s += once.linear_s + once.core_s
    elif workload.recompute == "selective":
        kernels_s += once.linear_s / 2 if workload.software.fused_attention else once.core_s
    launches_s = (3 + _RECOMPUTED_LAYERS[workload.recompute]) * gpu.efficiency.training_latency_s
    joined_s: Figures = (kernels_s**_SHARPNESS + launches_s**_SHARPNESS) ** (1 / _SHARPNESS)
    return model.num_layers / layouts.pp_size * joined_s


def _tensor_parallel_s(
    model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec, sequences: Sizes
) -> Figures:
    """Two all-reduces a layer and pass (with sequence parallelism the same bytes in two halves); not overlapped."""
    link = build_link(cluster, num_ranks=layouts.tp_size, stride=1, world_size=layouts.world_size)
    activation = sequences * workload.sequence_tokens * model.hidden_size * workload.element_bytes
    passes = 3 if workload.recompute == "full" else 2
    return model.num_layers / layouts.pp_size * 2 * passes * all_reduce_s(link, activation)


def _expert_parallel_s(
    model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec, sequences: Sizes
) -> Figures:
    """Tokens to their experts and back, in every layer and pass; each rank of a tensor group sends its part."""
    tokens = sequences * workload.sequence_tokens
    passes = 3 if workload.recompute == "full" else 2
    return passes * model.num_layers / layouts.pp_size * expert_exchange_s(model, cluster, layouts, workload, tokens)


def _hops_s(
    model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec, sequences: Sizes
) -> Figures:
    """A micro-batch to the next stage and its gradient back, each rank of the tensor group sending its part."""
    link = build_stage_link(cluster, layouts)
    activation = sequences * workload.sequence_tokens * model.hidden_size * workload.element_bytes
    return 2 * workload.pipeline_chunks * point_to_point_s(link, activation / layouts.tp_size)


def _gather_s(model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec) -> Figures:
    """FSDP's collectives of one micro-batch: weights for forward and backward, gradients scattered.

    Where it gathers the model, those of one update: the weights stay between the two.
    """
    link = build_link(
        cluster,
        num_ranks=layouts.dp_size,
        stride=1,
        world_size=layouts.world_size,
        shared_rails=workload.software.shared_rails,
    )
    collectives = 2 if workload.software.gathers == "model" else 3
    return np.where(layouts.fsdp, collectives * all_gather_s(link, fsdp_weight_bytes(model, layouts, workload)), 0.0)


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
    """Of ``parameters`` per rank that every ``spread``-th data-parallel rank has as well."""
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
    moved = 2 * state["optimizer_bytes"] + (state["gradient_bytes"] + 2 * state["weight_bytes"])
    return moved / (gpu.memory_bandwidth_bytes_per_s * gpu.efficiency.training_bandwidth)
