"""One forward pass over the batch: compute-bound (paper, Appendix C), with its collectives and launches.

FLOPs per token and layer: 4 h q + 4 h kv for the projections, 2 S q for causal attention over S tokens (half of the
square), 6 h f for the gated MLP; 2 h V for the logits. q and kv are the widths of queries and keys, f of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from hf_mapper.simulators.layouts import Figures, Layouts, Sizes, read_layouts
from hf_mapper.simulators.memory import (
    computed_parameters,
    fsdp_weight_bytes,
    inference_work_bytes,
    micro_batch_sequences,
)
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import ModelShape, ParallelSpec

__all__ = ["ForwardPass", "flops_per_token", "simulate_forward", "simulate_inference"]


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    """One micro-batch through one pipeline stage, in seconds.

    ``hop_s`` hands it to the next stage; ``gather_s`` collects FSDP's weights, which overlaps with computing.
    """

    compute_s: Figures
    tensor_parallel_s: Figures
    expert_parallel_s: Figures
    hop_s: Figures
    gather_s: Figures


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
    layouts: Layouts,
    workload: WorkloadSpec,
    *,
    sequences: Sizes,
    sequence_tokens: int | None = None,
    logits: bool = True,
) -> ForwardPass:
    """One micro-batch of ``sequences`` through one pipeline stage, each ``sequence_tokens`` long (default: whole).

    ``logits``: of every token, as for log-probabilities; a prefill needs them of the last one only.
    """
    gpu, length = cluster.machine.gpu, sequence_tokens or workload.sequence_tokens
    tokens, layers, world = sequences * length, model.num_layers / layouts.pp_size, layouts.world_size
    peak = gpu.peak(workload.dtype) * gpu.efficiency.inference_flops
    arithmetic_s = tokens * flops_per_token(model, length / 2, logits=logits) / layouts.num_parts / peak
    read_s = (
        workload.element_bytes
        * computed_parameters(model, layouts)
        / (gpu.memory_bandwidth_bytes_per_s * gpu.efficiency.memory_bandwidth)
    )
    boundary_bytes = tokens * model.hidden_size * workload.element_bytes
    tensor = build_link(cluster, num_ranks=layouts.tp_size, stride=1, world_size=world)
    sharded = build_link(cluster, num_ranks=layouts.dp_size, stride=layouts.tp_size, world_size=world)
    return ForwardPass(
        compute_s=np.hypot(np.maximum(arithmetic_s, read_s), layers * gpu.efficiency.layer_latency_s),
        tensor_parallel_s=2 * layers * all_reduce_s(tensor, boundary_bytes),
        expert_parallel_s=layers * expert_exchange_s(model, cluster, layouts, workload, tokens),
        hop_s=point_to_point_s(build_stage_link(cluster, layouts), boundary_bytes / layouts.tp_size),
        gather_s=np.where(layouts.fsdp, all_gather_s(sharded, fsdp_weight_bytes(model, layouts, workload)), 0.0),
    )


@overload
def simulate_inference(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec,
    workload: WorkloadSpec,
    *,
    backend: str | None = None,
) -> Estimate[float]: ...
@overload
def simulate_inference(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: Sequence[ParallelSpec],
    workload: WorkloadSpec,
    *,
    backend: str | Sequence[str] | None = None,
) -> Estimate[NDArray[np.float64]]: ...
def simulate_inference(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec | Sequence[ParallelSpec],
    workload: WorkloadSpec,
    *,
    backend: str | Sequence[str] | None = None,
) -> Estimate[Any]:
    """One forward pass over every sequence of the iteration, micro-batch after micro-batch through the pipeline.

    Where lengths vary, as of typical sequences.
    """
    layouts = read_layouts(model, parallel, backend)
    work_bytes = inference_work_bytes(model, layouts, workload)
    workload = workload.typical
    local = workload.num_sequences // layouts.dp_size
    sequences = micro_batch_sequences(workload, local)
    once = simulate_forward(model, cluster, layouts, workload, sequences=sequences)
    passes = local / sequences + layouts.pp_size - 1
    compute_s = passes * once.compute_s
    parts: dict[str, Figures] = {
        "compute_s": compute_s,
        "tensor_parallel_s": passes * once.tensor_parallel_s,
        "expert_parallel_s": passes * once.expert_parallel_s,
        "pipeline_hop_s": passes * once.hop_s,
        "exposed_gather_s": np.maximum(0.0, passes * once.gather_s - compute_s),
    }
    return build_estimate(parallel, latency_s=sum(parts.values()), memory_bytes=work_bytes, breakdown=parts)
