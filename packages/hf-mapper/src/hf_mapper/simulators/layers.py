"""The GPU's time in one layer's kernels, forward, by the sizes of each rank's shard.

A matrix multiplication of [m, k] by [k, n] takes 2 m n k FLOPs at the attained part of the peak, longer where a
dimension is small: tiles and the tensor cores' pipelines are then not filled, in inverse proportion to the size. What
is not a multiplication is bound by memory: it reads and writes whole activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_mapper.simulators.layouts import Figures, Sizes
from hf_mapper.specs import GpuSpec, WorkloadSpec
from hf_protocols import ModelShape

__all__ = ["LayerTimes", "compute_layer_times", "compute_logits_s", "matmul_s"]

_SHARED_PASSES = 12
"""Activations of the hidden size read or written by norms, residual sums and dropout or bias."""
_SCORE_PASSES = 8
"""Attention scores read or written where attention is not fused: scale, mask, softmax, dropout."""
_LOGIT_BYTES = 24
"""Bytes moved per logit by a cross entropy in fp32, forward and backward."""


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
    if workload.software.fused_attention:
        return core_s / 2
    moved = _SCORE_PASSES * sequences * heads * length**2 * workload.element_bytes
    return core_s + moved / _attained_bandwidth(gpu)


def _attained_bandwidth(gpu: GpuSpec) -> float:
    return gpu.memory_bandwidth_bytes_per_s * gpu.efficiency.training_bandwidth
