"""The prefill of a generation engine: bound by arithmetic (paper, Appendix C), with its collectives and launches.

FLOPs per token and layer: 4 h q + 4 h kv for the projections, 2 S q for causal attention over S tokens (half of the
square), 6 h f for the gated MLP; 2 h V for the logits. q and kv are the widths of queries and keys, f of the MLP.
"""

from __future__ import annotations

import numpy as np

from hf_mapper.simulators.communication import all_reduce_s, build_link, build_stage_link, point_to_point_s
from hf_mapper.simulators.layouts import Figures, Layouts, Sizes
from hf_mapper.simulators.memory import computed_parameters
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import ModelShape

__all__ = ["flops_per_token", "prefill_s"]


def flops_per_token(model: ModelShape, context_tokens: float, *, logits: bool = True) -> float:
    """Forward FLOPs of one token that attends to `context_tokens`, over all layers; of its active experts only."""
    hidden, query, key = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    experts = max(1, model.num_experts_per_token)
    layer = 4 * hidden * (query + key) + 4 * query * context_tokens
    layer += 6 * experts * hidden * model.intermediate_size + 2 * hidden * model.num_experts
    return model.num_layers * layer + (2 * hidden * model.vocab_size if logits else 0)


def prefill_s(
    model: ModelShape, cluster: ClusterSpec, replica: Layouts, workload: WorkloadSpec, sequences: Sizes
) -> Figures:
    """Seconds of the prompts of one wave on a replica, micro-batch after micro-batch through its pipeline."""
    gpu, length = cluster.machine.gpu, workload.prompt_tokens
    batch = np.maximum(1, np.minimum(sequences, workload.micro_batch_tokens // length))
    tokens, layers = batch * length, model.num_layers / replica.pp_size
    peak = gpu.peak(workload.dtype) * gpu.efficiency.generation_flops
    arithmetic_s = tokens * flops_per_token(model, length / 2, logits=False) / replica.num_parts / peak
    weights = workload.element_bytes * computed_parameters(model, replica)
    read_s = weights / (gpu.memory_bandwidth_bytes_per_s * gpu.efficiency.memory_bandwidth)
    launch_s = layers * gpu.efficiency.layer_latency_s
    boundary_bytes = tokens * model.hidden_size * workload.element_bytes
    tensor = build_link(cluster, num_ranks=replica.tp_size, stride=1, world_size=replica.world_size)
    compute_s: Figures = np.hypot(np.maximum(arithmetic_s, read_s), launch_s)
    reduce_s = 2 * layers * all_reduce_s(tensor, boundary_bytes)
    hop_s = point_to_point_s(build_stage_link(cluster, replica), boundary_bytes / replica.tp_size)
    passes = sequences / batch + replica.pp_size - 1
    return passes * (compute_s + reduce_s + hop_s)
