"""One forward pass over the batch: compute-bound (paper, Appendix C), with its collectives and launches.

FLOPs per token and layer: 4 h q + 4 h kv for the projections, 2 S q for causal attention over S tokens (half of the
square), 6 h f for the gated MLP; 2 h V for the logits. q and kv are the widths of queries and keys, f of the MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_mapper.simulators.communication import all_gather_s, all_reduce_s, build_link, point_to_point_s
from hf_mapper.simulators.estimate import Estimate
from hf_mapper.simulators.memory import default_backend, inference_work_bytes, micro_batch_sequences, weight_bytes
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import ModelShape, ParallelSpec

__all__ = ["ForwardPass", "flops_per_token", "simulate_forward", "simulate_inference"]


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    """One micro-batch through one pipeline stage, in seconds.

    ``hop_s`` hands it to the next stage; ``gather_s`` collects FSDP's weights, which overlaps with computing.
    """

    compute_s: float
    tensor_parallel_s: float
    hop_s: float
    gather_s: float


def flops_per_token(model: ModelShape, context_tokens: float, *, logits: bool = True) -> float:
    """Forward FLOPs of one token that attends to ``context_tokens``, over all layers; of its active experts only."""
    hidden, query, key = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    experts = max(1, model.num_experts_per_token)
    layer = 4 * hidden * (query + key) + 4 * query * context_tokens
    layer += 6 * experts * hidden * model.intermediate_size + 2 * hidden * model.num_experts
    return model.num_layers * layer + (2 * hidden * model.vocab_size if logits else 0)


def simulate_forward(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec,
    workload: WorkloadSpec,
    *,
    sequences: int,
    flops_efficiency: float,
    sequence_tokens: int | None = None,
    backend: str | None = None,
    logits: bool = True,
) -> ForwardPass:
    """One micro-batch of ``sequences`` through one pipeline stage, each ``sequence_tokens`` long (default: whole).

    ``logits``: of every token, as for log-probabilities; a prefill needs them of the last one only.
    """
    gpu, length = cluster.machine.gpu, sequence_tokens or workload.sequence_tokens
    tokens, layers = sequences * length, model.num_layers / parallel.pp_size
    shards = parallel.pp_size * parallel.tp_size
    peak = gpu.peak(workload.dtype) * flops_efficiency
    arithmetic_s = tokens * flops_per_token(model, length / 2, logits=logits) / shards / peak
    read_s = (
        weight_bytes(model, workload) / shards / (gpu.memory_bandwidth_bytes_per_s * gpu.efficiency.memory_bandwidth)
    )
    boundary_bytes = tokens * model.hidden_size * workload.element_bytes
    world = parallel.world_size
    tensor = build_link(cluster, num_ranks=parallel.tp_size, stride=1, world_size=world)
    stages = build_link(
        cluster, num_ranks=min(2, parallel.pp_size), stride=parallel.tp_size * parallel.dp_size, world_size=world
    )
    sharded = build_link(cluster, num_ranks=parallel.dp_size, stride=parallel.tp_size, world_size=world)
    fsdp = (backend or default_backend(parallel)) == "fsdp"
    return ForwardPass(
        compute_s=math.hypot(max(arithmetic_s, read_s), layers * gpu.efficiency.layer_latency_s),
        tensor_parallel_s=2 * layers * all_reduce_s(tensor, boundary_bytes),
        hop_s=point_to_point_s(stages, boundary_bytes / parallel.tp_size),
        gather_s=all_gather_s(sharded, weight_bytes(model, workload)) if fsdp else 0.0,
    )


def simulate_inference(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec,
    workload: WorkloadSpec,
    *,
    backend: str | None = None,
) -> Estimate:
    """One forward pass over every sequence of the iteration, micro-batch after micro-batch through the pipeline.

    Where lengths vary, as of typical sequences.
    """
    backend = backend or default_backend(parallel)
    work_bytes = inference_work_bytes(model, parallel, workload, backend=backend)
    workload = workload.typical
    local = workload.num_sequences // parallel.dp_size
    sequences = micro_batch_sequences(workload, local)
    efficiency = cluster.machine.gpu.efficiency.inference_flops
    once = simulate_forward(
        model, cluster, parallel, workload, sequences=sequences, flops_efficiency=efficiency, backend=backend
    )
    passes = local / sequences + parallel.pp_size - 1
    compute_s, tensor_s, hop_s = (passes * part for part in (once.compute_s, once.tensor_parallel_s, once.hop_s))
    exposed_s = max(0.0, passes * once.gather_s - compute_s)
    return Estimate(
        latency_s=compute_s + tensor_s + hop_s + exposed_s,
        memory_bytes=work_bytes,
        breakdown={
            "compute_s": compute_s,
            "tensor_parallel_s": tensor_s,
            "pipeline_hop_s": hop_s,
            "exposed_gather_s": exposed_s,
        },
    )
