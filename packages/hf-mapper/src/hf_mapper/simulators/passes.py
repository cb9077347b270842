"""Micro-batches through the pipeline of the training stack: forward alone, or with the backward pass behind it.

A backward pass costs two forwards, and little more than one where adapters are trained on a frozen base. Full recompute
repeats every layer's forward, selective recompute the core of attention, or where that is fused every second
multiplication. Kernels run behind their launches: the longer of the two sets the pace, or both where they are close.
The pipeline runs every micro-batch at the pace of the slowest stage, the last, which has the logits. Its bubble is of
pp - 1 micro-batches, divided by the chunks of an interleaved schedule. FSDP gathers a layer's weights for forward and
for backward and scatters its gradients behind computing, which they slow down.

In a layer's kernels, a matrix multiplication of [m, k] by [k, n] takes 2 m n k FLOPs at the attained part of the peak.
It takes longer where a dimension is small: tiles and the tensor cores' pipelines are then not filled, in inverse
proportion to the size. What is not a multiplication is bound by memory: it reads and writes whole activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_mapper.simulators.communication import (
    all_gather_s,
    all_reduce_s,
    build_link,
    build_stage_link,
    expert_exchange_s,
    point_to_point_s,
)
from hf_mapper.simulators.layouts import Figures, Layouts, Sizes
from hf_mapper.simulators.memory import fsdp_weight_bytes, micro_batch_sequences, trained_parameters
from hf_mapper.specs import ClusterSpec, GpuSpec, WorkloadSpec
from hf_protocols import ModelShape

__all__ = ["LayerTimes", "compute_layer_times", "compute_logits_s", "matmul_s", "simulate_passes"]

_SHARED_PASSES = 12
"""Activations of the hidden size read or written by norms, residual sums and dropout or bias."""
_SCORE_PASSES = 8
"""Attention scores read or written where attention is not fused: scale, mask, softmax, dropout."""
_LOGIT_BYTES = 24
"""Bytes moved per logit by a cross entropy in fp32, forward and backward."""
_EXPOSED_GATHERS = 0.6
"""Part by which FSDP's hidden transfers slow down computing: they run kernels and use memory bandwidth."""
_RECOMPUTED_LAYERS = {"none": 0.0, "selective": 0.5, "full": 1.0}
"""Part of a layer's kernels that recompute launches again."""


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds of a layer's forward pass on one rank: attention's core (scores and values) and everything else."""

    linear_s: Figures
    core_s: Figures


def matmul_s(gpu: GpuSpec, dtype: str, rows: Figures, columns: Figures, inner: Figures) -> Figures:
    """Seconds of one multiplication of [rows, inner] by [inner, columns]."""
    efficiency = gpu.efficiency
    slower = 1 + efficiency.half_size * (1 / rows + 1 / columns + 1 / inner)
    return 2 * rows * columns * inner * slower / (gpu.peak(dtype) * efficiency.training_flops)


def compute_layer_times(
    model: ModelShape, gpu: GpuSpec, workload: WorkloadSpec, *, sequences: Sizes, tp_size: Sizes, ep_size: Sizes = 1
) -> LayerTimes:
    """One layer on `sequences` of the workload's length, its weights sharded over `tp_size` ranks.

    Of `ep_size` ranks each has its part of the experts, and gets as many tokens as it gives away: fewer and larger
    multiplications.
    """
    length, dtype = workload.sequence_tokens, workload.dtype
    tokens, hidden = sequences * length, model.hidden_size
    query, key = model.num_heads * model.head_dim / tp_size, model.num_kv_heads * model.head_dim / tp_size
    width, active = model.intermediate_size / tp_size, max(1, model.num_experts_per_token)
    experts = max(1, model.num_experts) / ep_size
    routed = np.maximum(1.0, tokens * active / experts)
    linear_s = matmul_s(gpu, dtype, tokens, query + 2 * key, hidden) + matmul_s(gpu, dtype, tokens, hidden, query)
    up_s, down_s = (matmul_s(gpu, dtype, routed, *sizes) for sizes in ((2 * width, hidden), (hidden, width)))
    shared = _SHARED_PASSES * hidden / (tp_size if workload.software.sequence_parallel else 1)
    cut = 4 * (query + key) + 3 * active * width
    moved = tokens * (shared + cut) * workload.element_bytes
    return LayerTimes(
        linear_s=linear_s + experts * (up_s + down_s) + moved / _attained_bandwidth(gpu),
        core_s=_core_s(model, gpu, workload, sequences, tp_size),
    )


def compute_logits_s(
    model: ModelShape, gpu: GpuSpec, workload: WorkloadSpec, *, sequences: Sizes, tp_size: Sizes, trains: bool
) -> Figures:
    """Logits and loss on the last pipeline stage; with `trains` their backward pass too, else a third of all."""
    tokens, vocabulary = sequences * workload.sequence_tokens, model.vocab_size / tp_size
    once = matmul_s(gpu, workload.dtype, tokens, vocabulary, model.hidden_size)
    whole = 3 * once + _LOGIT_BYTES * tokens * vocabulary / _attained_bandwidth(gpu)
    return whole if trains else whole / 3


def _core_s(model: ModelShape, gpu: GpuSpec, workload: WorkloadSpec, sequences: Sizes, tp_size: Sizes) -> Figures:
    """Two multiplications per head; a fused kernel skips what the causal mask hides and writes no scores."""
    length, heads = workload.sequence_tokens, model.num_heads / tp_size
    scores_s = matmul_s(gpu, workload.dtype, length, length, model.head_dim)
    core_s = 2 * sequences * heads * scores_s
    if workload.software.fuses_attention(model):
        return core_s / 2
    moved = _SCORE_PASSES * sequences * heads * length**2 * workload.element_bytes
    return core_s + moved / _attained_bandwidth(gpu)


def _attained_bandwidth(gpu: GpuSpec) -> float:
    return gpu.memory_bandwidth_bytes_per_s * gpu.efficiency.training_bandwidth


def simulate_passes(
    model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec, local: Sizes, *, trains: bool
) -> dict[str, Figures]:
    """Seconds, by part, of `local` sequences per data-parallel rank; with `trains` forward and backward."""
    sequences = micro_batch_sequences(workload, local)
    micro_batches = local / sequences
    # Each micro-batch at the pace of the last stage, and the others' part of filling and draining the pipeline.
    passes = micro_batches + (layouts.pp_size - 1) / workload.pipeline_chunks
    given = (model, cluster, layouts, workload, sequences)
    ways = 2 if trains else 1
    visits = ways + 1 if trains and workload.recompute == "full" else ways
    logits_s = compute_logits_s(
        model, cluster.machine.gpu, workload, sequences=sequences, tp_size=layouts.tp_size, trains=trains
    )
    parts: dict[str, Figures] = {
        "compute_s": passes * _stage_compute_s(*given, trains=trains),
        "logits_s": micro_batches * logits_s,
        "tensor_parallel_s": passes * visits * _tensor_parallel_s(*given),
        "expert_parallel_s": passes * visits * _expert_parallel_s(*given),
        "pipeline_hop_s": passes * ways * _hop_s(*given),
    }
    gathers = _count_gathers(workload, trains=trains) * (1 if workload.software.gathers == "model" else micro_batches)
    gather_s = gathers * _gather_s(model, cluster, layouts, workload)
    computing_s = parts["compute_s"] + parts["logits_s"]
    parts["exposed_gather_s"] = np.maximum(_EXPOSED_GATHERS * gather_s, gather_s - computing_s)
    return parts


def _stage_compute_s(
    model: ModelShape,
    cluster: ClusterSpec,
    layouts: Layouts,
    workload: WorkloadSpec,
    sequences: Sizes,
    *,
    trains: bool,
) -> Figures:
    """One micro-batch through the layers of one pipeline stage."""
    gpu = cluster.machine.gpu
    once = compute_layer_times(
        model, gpu, workload, sequences=sequences, tp_size=layouts.tp_size, ep_size=layouts.ep_size
    )
    kernels_s, launches = once.linear_s + once.core_s, 1.0
    if trains:
        # of a frozen matrix the backward pass has the gradient of its input alone
        ways = 3.0 if workload.adapters is None else 2 + trained_parameters(model, workload) / model.num_parameters
        kernels_s, launches = ways * kernels_s, 3 + _RECOMPUTED_LAYERS[workload.recompute]
        if workload.recompute == "full":
            kernels_s += once.linear_s + once.core_s
        elif workload.recompute == "selective":
            kernels_s += once.linear_s / 2 if workload.software.fuses_attention(model) else once.core_s
    launches_s = launches * gpu.efficiency.training_latency_s
    joined_s: Figures = np.cbrt(kernels_s**3 + launches_s**3)
    return model.num_layers / layouts.pp_size * joined_s


def _tensor_parallel_s(
    model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec, sequences: Sizes
) -> Figures:
    """Two all-reduces a layer (with sequence parallelism the same bytes in two halves); not overlapped."""
    link = build_link(cluster, num_ranks=layouts.tp_size, stride=1, world_size=layouts.world_size)
    activation = sequences * workload.sequence_tokens * model.hidden_size * workload.element_bytes
    return model.num_layers / layouts.pp_size * 2 * all_reduce_s(link, activation)


def _expert_parallel_s(
    model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec, sequences: Sizes
) -> Figures:
    """Tokens to their experts and back, in every layer; each rank of a tensor group sends its part."""
    tokens = sequences * workload.sequence_tokens
    return model.num_layers / layouts.pp_size * expert_exchange_s(model, cluster, layouts, workload, tokens)


def _hop_s(
    model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec, sequences: Sizes
) -> Figures:
    """A micro-batch to the next stage, or its gradient back, each rank of the tensor group sending its part."""
    link = build_stage_link(cluster, layouts)
    activation = sequences * workload.sequence_tokens * model.hidden_size * workload.element_bytes
    return workload.pipeline_chunks * point_to_point_s(link, activation / layouts.tp_size)


def _count_gathers(workload: WorkloadSpec, *, trains: bool) -> int:
    """FSDP's collectives: weights for forward and, unless the whole model stays, for backward; gradients scattered.

    Those of adapters are too small to count.
    """
    if not trains:
        return 1
    scatters = 0 if workload.adapters is not None else 1
    return 1 + scatters if workload.software.gathers == "model" else 2 + scatters


def _gather_s(model: ModelShape, cluster: ClusterSpec, layouts: Layouts, workload: WorkloadSpec) -> Figures:
    """One of FSDP's collectives, over all weights."""
    link = build_link(
        cluster,
        num_ranks=layouts.dp_size,
        stride=1,
        world_size=layouts.world_size,
        shared_rails=workload.software.shared_rails,
    )
    return np.where(layouts.fsdp, all_gather_s(link, fsdp_weight_bytes(model, layouts, workload)), 0.0)
