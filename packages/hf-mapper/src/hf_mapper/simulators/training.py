"""Updates of a trained model: forward, backward and optimizer over every mini-batch; compute-bound (Appendix C).

A backward pass costs two forwards, three with full recompute. The pipeline runs 1F1B without interleaving: its bubble
is pp - 1 micro-batches. Gradients are reduced once per update, not overlapped; FSDP gathers a layer's weights for
forward and for backward and scatters its gradients, overlapped with computing.
"""

from __future__ import annotations

from hf_mapper.simulators.communication import all_gather_s, build_link
from hf_mapper.simulators.estimate import Estimate
from hf_mapper.simulators.inference import simulate_forward
from hf_mapper.simulators.memory import (
    default_backend,
    micro_batch_sequences,
    state_bytes,
    training_work_bytes,
    weight_bytes,
)
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import ModelShape, ParallelSpec

__all__ = ["simulate_training"]


def simulate_training(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec,
    workload: WorkloadSpec,
    *,
    backend: str | None = None,
) -> Estimate:
    """All the updates of one iteration: ``epochs * mini_batches`` of them."""
    backend = backend or default_backend(parallel)
    updates = workload.epochs * workload.mini_batches
    local = workload.mini_batch_sequences // parallel.dp_size
    sequences = micro_batch_sequences(workload, local)
    efficiency = cluster.machine.gpu.efficiency.training_flops
    once = simulate_forward(
        model, cluster, parallel, workload, sequences=sequences, flops_efficiency=efficiency, backend=backend
    )
    recomputed = 1 if workload.recompute == "full" else 0
    passes = updates * (local / sequences + parallel.pp_size - 1)
    parts = {
        "compute_s": passes * (3 + recomputed) * once.compute_s,
        "tensor_parallel_s": passes * (2 + recomputed) * once.tensor_parallel_s,
        "pipeline_hop_s": passes * 2 * once.hop_s,
        "gradient_sync_s": updates * _gradient_sync_s(model, cluster, parallel, workload, backend),
        "optimizer_s": updates * _optimizer_s(model, cluster, parallel, workload, backend),
    }
    parts["exposed_gather_s"] = max(0.0, passes * 3 * once.gather_s - parts["compute_s"])
    return Estimate(
        latency_s=sum(parts.values()),
        memory_bytes=training_work_bytes(model, parallel, workload, backend=backend),
        breakdown=parts,
    )


def _gradient_sync_s(
    model: ModelShape, cluster: ClusterSpec, parallel: ParallelSpec, workload: WorkloadSpec, backend: str
) -> float:
    """Megatron's distributed optimizer: scatter the summed fp32 gradients, gather the new weights. FSDP: none here."""
    if backend == "fsdp":
        return 0.0
    link = build_link(cluster, num_ranks=parallel.dp_size, stride=parallel.tp_size, world_size=parallel.world_size)
    shards = parallel.pp_size * parallel.tp_size
    gradients = state_bytes(model, parallel, workload, trained=True, backend=backend)["gradient_bytes"]
    return all_gather_s(link, gradients) + all_gather_s(link, weight_bytes(model, workload) / shards)


def _optimizer_s(
    model: ModelShape, cluster: ClusterSpec, parallel: ParallelSpec, workload: WorkloadSpec, backend: str
) -> float:
    """Adam reads the gradient and reads and writes its state and the weights, at the memory's speed."""
    gpu = cluster.machine.gpu
    state = state_bytes(model, parallel, workload, trained=True, backend=backend)
    moved = 2 * state["optimizer_bytes"] + (state["gradient_bytes"] + 2 * state["weight_bytes"])
    return moved / (gpu.memory_bandwidth_bytes_per_s * gpu.efficiency.memory_bandwidth)
