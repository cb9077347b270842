"""Bytes per rank: what stays (weights, gradients, optimizer) and what a call adds while it runs.

A trained parameter takes 18 bytes in mixed precision (2 weights, 4 gradients, 12 optimizer with the fp32 master) and
16 in fp32; an inference parameter its own 2 or 4 (paper, section 8.1). FSDP shards all of it over its ranks, experts
whole; Megatron shards weights and gradients over pp * tp, those of experts over ep too, and, with its distributed
optimizer, the optimizer over dp as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from hf_mapper.adapters import count_adapter_parameters
from hf_mapper.simulators.estimate import Estimate, build_estimate
from hf_mapper.simulators.layouts import (
    Figures,
    GenerationLayouts,
    Layouts,
    Sizes,
    check_layouts,
    read_generation,
    read_layouts,
)
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import CallKind, GenerationSpec, ModelShape, ParallelSpec

__all__ = [
    "computed_parameters",
    "estimate_memory",
    "expert_parameters",
    "fsdp_weight_bytes",
    "gathered_weight_bytes",
    "inference_work_bytes",
    "kv_cache_bytes",
    "kv_token_bytes",
    "micro_batch_sequences",
    "rank_parameters",
    "received_weight_bytes",
    "stage_parameters",
    "state_bytes",
    "trained_parameters",
    "training_work_bytes",
    "weight_bytes",
]

_ALL_CALLS: Sequence[CallKind] = ("generation", "inference", "training")
_ADAM_BYTES = 8
_MASTER_BYTES = 4
_SOFTMAX_BYTES = 4
"""Of a score that attention has in float32 for its softmax, next to two copies in the model's dtype."""
_LOGIT_BYTES = 4
_LOSS_BYTES = 12
"""Bytes per logit at the peak of PyTorch's cross entropy: log-softmax, its gradient and the logit's, all in fp32."""


def weight_bytes(model: ModelShape, workload: WorkloadSpec) -> float:
    """Bytes of the whole model in the workload's dtype."""
    return float(model.num_parameters * workload.element_bytes)


def expert_parameters(model: ModelShape) -> int:
    """Parameters of all experts: three matrices of each, in every layer."""
    return 3 * model.num_layers * model.num_experts * model.hidden_size * model.intermediate_size


def computed_parameters(model: ModelShape, layouts: Layouts) -> Figures:
    """Parameters that a rank computes with: sharded over pp * tp, those of experts over ep too."""
    experts = expert_parameters(model)
    return (model.num_parameters - experts + experts / layouts.ep_size) / layouts.num_parts


def rank_parameters(model: ModelShape, layouts: Layouts) -> Figures:
    """Parameters of a rank's shard: FSDP cuts all of them over all ranks, Megatron has those that it computes with.

    FSDP2 cuts the experts of a layer, stacked, between two of them, and gives every rank room for as many as the
    fullest one has.
    """
    experts = expert_parameters(model)
    stacked = -(-model.num_experts // layouts.world_size) * experts / max(1, model.num_experts)
    cut = (model.num_parameters - experts) / layouts.world_size + stacked
    return np.where(layouts.fsdp, cut, computed_parameters(model, layouts))


def fsdp_weight_bytes(model: ModelShape, layouts: Layouts, workload: WorkloadSpec) -> Figures:
    """Bytes of the whole model as FSDP gathers it: of every rank as many as of the fullest."""
    return workload.element_bytes * layouts.world_size * rank_parameters(model, layouts)


def stage_parameters(model: ModelShape, layouts: Layouts) -> Figures:
    """Parameters of a rank's shard in the fullest pipeline stage: the first, which has the embedding, or the last.

    Tied ones are there twice where these are two stages.
    """
    one_end = model.vocab_size * model.hidden_size / layouts.tp_size
    fullest = computed_parameters(model, layouts) - _num_ends(model) * one_end / layouts.pp_size + one_end
    is_cut = np.logical_and(layouts.pp_size > 1, np.logical_not(layouts.fsdp))
    return np.where(is_cut, fullest, rank_parameters(model, layouts))


def micro_batch_sequences(workload: WorkloadSpec, local_sequences: Sizes) -> Sizes:
    """Sequences in one forward pass of a rank that has `local_sequences`: by tokens, at least one."""
    sequences: Sizes = np.maximum(
        1, np.minimum(local_sequences, workload.micro_batch_tokens // workload.sequence_tokens)
    )
    return sequences


def state_bytes(model: ModelShape, layouts: Layouts, workload: WorkloadSpec, *, trained: bool) -> dict[str, Figures]:
    """Bytes per rank that stay between calls: weights, and for a trained model gradients and optimizer.

    Of the fullest pipeline stage; its optimizer is sharded over the ranks of that stage.
    """
    parameters = stage_parameters(model, layouts)
    weights = workload.element_bytes * parameters
    if not trained:
        return {"weight_bytes": weights, "gradient_bytes": 0.0, "optimizer_bytes": 0.0}
    if workload.adapters is not None:
        return _adapted_state(model, layouts, workload)
    master = 0 if workload.dtype == "float32" or workload.software.cast_weights else 4
    if workload.software.cast_weights:
        weights = 4 * parameters
    sharded = _stepped_parameters(model, layouts) if workload.software.distributed_optimizer else parameters
    return {
        "weight_bytes": weights,
        "gradient_bytes": workload.software.gradient_bytes * parameters,
        "optimizer_bytes": (_ADAM_BYTES + master) * sharded,
    }


def _adapted_state(model: ModelShape, layouts: Layouts, workload: WorkloadSpec) -> dict[str, Figures]:
    """Of a frozen base in fp32, without gradients and optimizer, and its adapters, with both."""
    adapters = trained_parameters(model, workload) / layouts.world_size
    return {
        "weight_bytes": _MASTER_BYTES * (stage_parameters(model, layouts) + adapters),
        "gradient_bytes": workload.software.gradient_bytes * adapters,
        "optimizer_bytes": _ADAM_BYTES * adapters,
    }


def trained_parameters(model: ModelShape, workload: WorkloadSpec) -> int:
    """Parameters that have gradients: all, or those of the adapters."""
    adapters = workload.adapters
    return model.num_parameters if adapters is None else count_adapter_parameters(model, adapters)


def _stepped_parameters(model: ModelShape, layouts: Layouts) -> Figures:
    """Parameters that a rank steps if a stage distributes its parameters, all experts included, over its replicas."""
    spread = expert_parameters(model) / layouts.num_parts * (1 - 1 / layouts.ep_size)
    replicas = layouts.world_size / layouts.num_parts
    of_stage = (stage_parameters(model, layouts) + spread) / replicas
    return np.where(layouts.fsdp, rank_parameters(model, layouts), of_stage)


def training_work_bytes(model: ModelShape, layouts: Layouts, workload: WorkloadSpec) -> Figures:
    """Bytes per rank that an update holds beyond the state: activations, logits and their gradient, FSDP's layers.

    The first pipeline stage keeps the micro-batches of up to pp stages in flight, and of an interleaved schedule those
    of its other chunks too. With recompute one layer at a time is held whole, when the logits are gone. Where lengths
    vary, the larger of a micro-batch of the longest sequences and one of typical ones.
    """
    longest, typical = (_update_bytes(model, layouts, one) for one in (workload, workload.typical))
    return np.maximum(longest, typical)


def _update_bytes(model: ModelShape, layouts: Layouts, workload: WorkloadSpec) -> Figures:
    """`training_work_bytes` with one length for every sequence."""
    local = workload.mini_batch_sequences // layouts.dp_size
    sequences = micro_batch_sequences(workload, local)
    tokens, chunks = sequences * workload.sequence_tokens, workload.pipeline_chunks
    depth = layouts.pp_size + (layouts.pp_size - 1) / chunks if chunks > 1 else layouts.pp_size
    in_flight = np.minimum(depth, -(-local // sequences))
    layers = model.num_layers / layouts.pp_size
    whole = _layer_activation_bytes(model, layouts, workload, tokens) + _score_bytes(
        model, layouts, workload, sequences
    )
    kept = whole if workload.recompute == "none" else _kept_bytes(model, layouts, workload, tokens)
    per_logit = 2 * workload.element_bytes if workload.software.fused_loss else _LOSS_BYTES
    logits = tokens * model.vocab_size * per_logit / layouts.tp_size
    activations = in_flight * layers * kept + np.maximum(logits, whole - kept)
    return activations + _prefetch_bytes(model, layouts, workload) + _whole_gradients(model, layouts, workload)


def inference_work_bytes(model: ModelShape, layouts: Layouts, workload: WorkloadSpec) -> Figures:
    """Bytes per rank that one forward pass holds: one layer's activations and scores, the logits, FSDP's layers."""
    local = workload.num_sequences // layouts.dp_size
    longest, typical = workload.sequence_tokens, workload.typical.sequence_tokens
    few, many = (micro_batch_sequences(one, local) for one in (workload, workload.typical))
    tokens = np.maximum(few * longest, many * typical)
    logits = tokens * model.vocab_size * _LOGIT_BYTES / layouts.tp_size
    layer = _layer_activation_bytes(model, layouts, workload, tokens)
    if not workload.software.fuses_attention(model):
        pairs = np.maximum(few * longest**2, many * typical**2)
        layer = layer + (2 * workload.element_bytes + _SOFTMAX_BYTES) * pairs * model.num_heads / layouts.tp_size
    return layer + logits + _prefetch_bytes(model, layouts, workload)


def kv_cache_bytes(
    model: ModelShape, generation: GenerationSpec | GenerationLayouts, workload: WorkloadSpec, sequences: Sizes
) -> Figures:
    """Bytes per rank of the keys and values of `sequences` full sequences of one generation replica.

    Where lengths vary: their expected sum and two standard deviations, at least one longest and at most all of them.
    """
    prompt, prompt_variance = _moments(workload.prompt_lengths or (workload.prompt_tokens,))
    response, response_variance = _moments(workload.response_lengths or (workload.response_tokens,))
    expected = sequences * (prompt + response) + 2 * np.sqrt(sequences * (prompt_variance + response_variance))
    tokens = np.maximum(workload.sequence_tokens, np.minimum(expected, sequences * workload.sequence_tokens))
    return tokens * kv_token_bytes(model, generation, workload)


def kv_token_bytes(
    model: ModelShape, generation: GenerationSpec | GenerationLayouts, workload: WorkloadSpec
) -> Figures:
    """Bytes per rank of one token's keys and values.

    Where gen_tp exceeds the number of KV heads, each rank still holds a whole head.
    """
    tp_share = np.maximum(1 / generation.gen_tp_size, 1 / model.num_kv_heads)
    return model.kv_bytes_per_token * workload.element_bytes / 2 * tp_share / generation.gen_pp_size


def _moments(lengths: Sequence[int]) -> tuple[float, float]:
    """Mean and variance."""
    mean = sum(lengths) / len(lengths)
    return mean, sum((length - mean) ** 2 for length in lengths) / len(lengths)


def gathered_weight_bytes(
    model: ModelShape, layouts: Layouts, generation: GenerationLayouts, workload: WorkloadSpec
) -> Figures:
    """Bytes per rank of generation weights beyond the training shard, both of their fullest stages.

    Nested Megatron layouts keep the shard inside the generation weights (paper, Table 2: redundancy 0). An FSDP shard
    is sharded another way, so the generation weights are a second copy. On a single rank the shard is the whole model:
    where both have one dtype, generation uses it as it is.
    """
    replica = Layouts(
        pp_size=generation.gen_pp_size,
        tp_size=generation.gen_tp_size,
        dp_size=1,
        world_size=generation.replica_size,
        fsdp=False,
    )
    casts = workload.software.cast_weights and workload.dtype != "float32"
    is_inside = np.logical_not(layouts.fsdp) | ((layouts.world_size == 1) & (not casts))
    shard = np.where(is_inside, stage_parameters(model, layouts), 0.0)
    return workload.element_bytes * (stage_parameters(model, replica) - shard)


def received_weight_bytes(
    model: ModelShape, layouts: Layouts, generation: GenerationLayouts, workload: WorkloadSpec
) -> Figures:
    """Bytes per rank received in the train -> generate transition, in the mean over stages, and for FSDP over ranks.

    Of Megatron's nested sizes what the shard lacks (Table 2, as `hf_protocols.compute_transition_cost`); for FSDP
    a rank has 1/n of what it needs, adapters included (exact for replicas of one rank, an estimate for larger ones).
    Adapters that are sent alone are whole on every rank.
    """
    wanted = weight_bytes(model, workload) / generation.replica_size
    if workload.adapters is not None and workload.adapters.sends != "merged":
        adapters = trained_parameters(model, workload) * workload.element_bytes
        alone = workload.adapters.sends == "adapters"
        wanted = adapters if alone else wanted + adapters / generation.replica_size
    shard = workload.element_bytes * rank_parameters(model, layouts)
    return np.where(layouts.fsdp, wanted * (1 - 1 / layouts.world_size), wanted - shard)


@overload
def estimate_memory(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec,
    workload: WorkloadSpec,
    *,
    calls: Sequence[CallKind] = _ALL_CALLS,
    generation: GenerationSpec | None = None,
    num_waves: int = 1,
    backend: str | None = None,
) -> Estimate[float]: ...
@overload
def estimate_memory(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: Sequence[ParallelSpec],
    workload: WorkloadSpec,
    *,
    calls: Sequence[CallKind] = _ALL_CALLS,
    generation: GenerationSpec | Sequence[GenerationSpec] | None = None,
    num_waves: int | Sequence[int] = 1,
    backend: str | Sequence[str] | None = None,
) -> Estimate[NDArray[np.float64]]: ...
def estimate_memory(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec | Sequence[ParallelSpec],
    workload: WorkloadSpec,
    *,
    calls: Sequence[CallKind] = _ALL_CALLS,
    generation: GenerationSpec | Sequence[GenerationSpec] | None = None,
    num_waves: int | Sequence[int] = 1,
    backend: str | Sequence[str] | None = None,
) -> Estimate[Any]:
    """Bytes of one rank of a single model with these `calls`, by default all: its state and largest call; no latency.

    `generation` partitions a replica, by default as `parallel` does the model: pp * tp ranks.
    `num_waves` rounds of generation share one KV cache. Compare with `cluster.machine.gpu.usable_bytes`.
    """
    layouts = read_layouts(model, parallel, backend)
    check_layouts(model, layouts, cluster)
    state = state_bytes(model, layouts, workload, trained="training" in calls)
    work: dict[str, Figures] = {"activation_bytes": 0.0, "kv_cache_bytes": 0.0, "gathered_weight_bytes": 0.0}
    if "training" in calls:
        work["activation_bytes"] = training_work_bytes(model, layouts, workload)
    if "inference" in calls:
        inference = inference_work_bytes(model, layouts, workload)
        work["activation_bytes"] = np.maximum(work["activation_bytes"], inference)
    if "generation" in calls:
        rollout = read_generation(layouts, generation, num_waves)
        replicas = layouts.world_size // rollout.replica_size
        sequences = -(-workload.num_sequences // (replicas * rollout.num_waves))
        work["kv_cache_bytes"] = kv_cache_bytes(model, rollout, workload, sequences)
        work["gathered_weight_bytes"] = gathered_weight_bytes(model, layouts, rollout, workload)
    largest = np.maximum(work["activation_bytes"], work["kv_cache_bytes"] + work["gathered_weight_bytes"])
    return build_estimate(
        parallel, latency_s=0.0, memory_bytes=sum(state.values()) + largest, breakdown={**state, **work}
    )


def _num_ends(model: ModelShape) -> int:
    """Matrices of the vocabulary: embedding and head, or one for both."""
    return 1 if model.tie_embeddings else 2


def _layer_activation_bytes(model: ModelShape, layouts: Layouts, workload: WorkloadSpec, tokens: Sizes) -> Figures:
    """Bytes that one layer keeps for backward: norms in and out, q, k, v, attention, gate, up, their product."""
    experts = max(1, model.num_experts_per_token)
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # A mixture brings a copy of every token to each of its experts, which the tensor group cuts, and gets outputs back.
    copies = model.num_experts_per_token * model.hidden_size
    shared = (4 * workload.element_bytes + 2 * workload.software.dropout) * model.hidden_size
    shared += copies * workload.element_bytes
    cut = (2 * query + 2 * key + 3 * experts * model.intermediate_size) / layouts.tp_size
    return tokens * (shared / _shared_parts(layouts, workload) + (copies + cut) * workload.element_bytes)


def _kept_bytes(model: ModelShape, layouts: Layouts, workload: WorkloadSpec, tokens: Sizes) -> Figures:
    """Bytes that one layer keeps until its backward pass begins, with recompute.

    Full: its input. Selective: everything but the scores where attention is not fused; else its input, attention's
    output and that of every second multiplication.
    """
    inputs = model.hidden_size / _shared_parts(layouts, workload)
    if workload.recompute == "full":
        return tokens * inputs * workload.element_bytes
    if not workload.software.fuses_attention(model):
        return _layer_activation_bytes(model, layouts, workload, tokens)
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    products = query + 2 * key + 2 * model.hidden_size
    products += 2 * max(1, model.num_experts_per_token) * model.intermediate_size
    return tokens * (inputs + (query + products / 2) / layouts.tp_size) * workload.element_bytes


def _shared_parts(layouts: Layouts, workload: WorkloadSpec) -> Sizes:
    """Into how many parts the tensor group cuts what its ranks would else all hold: norms and residuals."""
    return layouts.tp_size if workload.software.sequence_parallel else 1


def _score_bytes(model: ModelShape, layouts: Layouts, workload: WorkloadSpec, sequences: Sizes) -> Figures:
    """Probabilities and dropout that attention keeps where it is not fused (Korthikanti et al., 5 a s^2 b)."""
    if workload.software.fuses_attention(model):
        return 0.0
    scores = sequences * model.num_heads * workload.sequence_tokens**2 / layouts.tp_size
    return (workload.element_bytes + (workload.element_bytes + 1) * workload.software.dropout) * scores


def _prefetch_bytes(model: ModelShape, layouts: Layouts, workload: WorkloadSpec) -> Figures:
    """Bytes that FSDP holds whole: two layers and, for the whole pass, embedding and head, which belong to no layer.

    Or two matrices (of half an MLP), or the model, by what the software gathers.
    """
    ends = _num_ends(model) * model.vocab_size * model.hidden_size * workload.element_bytes
    whole = fsdp_weight_bytes(model, layouts, workload)
    matrix = 1.5 * model.hidden_size * model.intermediate_size * workload.element_bytes
    ahead = {"matrix": 2 * matrix, "layer": ends + 2 * (whole - ends) / model.num_layers, "model": whole}
    sharded = np.logical_and(layouts.fsdp, layouts.world_size > 1)
    return np.where(sharded, ahead[workload.software.gathers], 0.0)


def _whole_gradients(model: ModelShape, layouts: Layouts, workload: WorkloadSpec) -> Figures:
    """Bytes that FSDP with a gathered model sums whole, until the last micro-batch scatters them."""
    is_whole = workload.software.gathers == "model"
    sharded = np.logical_and(layouts.fsdp, layouts.world_size > 1)
    summed = workload.software.gradient_bytes * trained_parameters(model, workload)
    return np.where(sharded, is_whole * summed, 0.0)
