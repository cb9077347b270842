"""Bytes per rank: what stays (weights, gradients, optimizer) and what a call adds while it runs.

A trained parameter takes 18 bytes in mixed precision (2 weights, 4 gradients, 12 optimizer with the fp32 master) and
16 in fp32; an inference parameter its own 2 or 4 (paper, section 8.1). FSDP shards all of it over its ranks; Megatron
shards weights and gradients over pp * tp and, with its distributed optimizer, the optimizer over dp as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_mapper.simulators.estimate import Estimate
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import CallKind, GenerationSpec, ModelShape, ParallelSpec, Topology, compute_transition_cost

__all__ = [
    "default_backend",
    "estimate_memory",
    "gathered_weight_bytes",
    "inference_work_bytes",
    "kv_cache_bytes",
    "kv_token_bytes",
    "micro_batch_sequences",
    "received_weight_bytes",
    "state_bytes",
    "training_work_bytes",
    "weight_bytes",
]

_ADAM_BYTES = 8
_LOGIT_BYTES = 4
_LOSS_BYTES = 10
"""Per logit of a loss: itself in 16 bits, in fp32, and its gradient in fp32."""
_FUSED_LOSS_BYTES = 4
"""Of a fused one: itself in 16 bits, later its gradient, and a working copy."""


def default_backend(parallel: ParallelSpec) -> str:
    """``"fsdp"`` where the model is not cut (pp = tp = 1), else ``"megatron"``."""
    return "fsdp" if parallel.pp_size == parallel.tp_size == 1 else "megatron"


def weight_bytes(model: ModelShape, workload: WorkloadSpec) -> float:
    """Bytes of the whole model in the workload's dtype."""
    return float(model.num_parameters * workload.element_bytes)


def micro_batch_sequences(workload: WorkloadSpec, local_sequences: int) -> int:
    """Sequences in one forward pass of a rank that has ``local_sequences``: by tokens, at least one."""
    return max(1, min(local_sequences, workload.micro_batch_tokens // workload.sequence_tokens))


def state_bytes(
    model: ModelShape, parallel: ParallelSpec, workload: WorkloadSpec, *, trained: bool, backend: str
) -> dict[str, float]:
    """Bytes per rank that stay between calls: weights, and for a trained model gradients and optimizer."""
    everywhere = parallel.world_size if backend == "fsdp" else parallel.pp_size * parallel.tp_size
    weights = weight_bytes(model, workload) / everywhere
    if not trained:
        return {"weight_bytes": weights, "gradient_bytes": 0.0, "optimizer_bytes": 0.0}
    master = 0 if workload.dtype == "float32" or workload.software.cast_weights else 4
    if workload.software.cast_weights:
        weights = 4 * model.num_parameters / everywhere
    sharded = parallel.world_size if backend == "fsdp" or workload.software.distributed_optimizer else everywhere
    return {
        "weight_bytes": weights,
        "gradient_bytes": workload.software.gradient_bytes * model.num_parameters / everywhere,
        "optimizer_bytes": (_ADAM_BYTES + master) * model.num_parameters / sharded,
    }


def training_work_bytes(model: ModelShape, parallel: ParallelSpec, workload: WorkloadSpec, *, backend: str) -> float:
    """Bytes per rank that an update holds beyond the state: activations, logits and their gradient, FSDP's layers.

    The first pipeline stage keeps the micro-batches of up to pp stages in flight, and of an interleaved schedule those
    of its other chunks too. With recompute one layer at a time is held whole. Where lengths vary, the larger of a
    micro-batch of the longest sequences and one of typical ones.
    """
    return max(_update_bytes(model, parallel, one, backend) for one in {workload, workload.typical})


def _update_bytes(model: ModelShape, parallel: ParallelSpec, workload: WorkloadSpec, backend: str) -> float:
    """``training_work_bytes`` with one length for every sequence."""
    local = workload.mini_batch_sequences // parallel.dp_size
    sequences = micro_batch_sequences(workload, local)
    tokens, chunks = sequences * workload.sequence_tokens, workload.pipeline_chunks
    depth = parallel.pp_size + (parallel.pp_size - 1) / chunks if chunks > 1 else parallel.pp_size
    in_flight = min(depth, -(-local // sequences))
    layers = model.num_layers / parallel.pp_size
    whole = _layer_activation_bytes(model, parallel, workload, tokens) + _score_bytes(
        model, parallel, workload, sequences
    )
    if workload.recompute == "none":
        activations = in_flight * layers * whole
    else:
        kept = _kept_bytes(model, parallel, workload, tokens)
        activations = in_flight * layers * kept + whole
    per_logit = _FUSED_LOSS_BYTES if workload.software.fused_loss else _LOSS_BYTES
    logits = tokens * model.vocab_size * per_logit / parallel.tp_size
    return activations + logits + _prefetch_bytes(model, parallel, workload, backend)


def inference_work_bytes(model: ModelShape, parallel: ParallelSpec, workload: WorkloadSpec, *, backend: str) -> float:
    """Bytes per rank that one forward pass holds: one layer's activations, the logits, FSDP's layers."""
    local = workload.num_sequences // parallel.dp_size
    tokens = max(micro_batch_sequences(one, local) * one.sequence_tokens for one in {workload, workload.typical})
    logits = tokens * model.vocab_size * _LOGIT_BYTES / parallel.tp_size
    layer = _layer_activation_bytes(model, parallel, workload, tokens)
    return layer + logits + _prefetch_bytes(model, parallel, workload, backend)


def kv_cache_bytes(model: ModelShape, generation: GenerationSpec, workload: WorkloadSpec, sequences: int) -> float:
    """Bytes per rank of the keys and values of ``sequences`` full sequences of one generation replica.

    Where lengths vary: their expected sum and two standard deviations, at least one longest and at most all of them.
    """
    prompt, prompt_variance = _moments(workload.prompt_lengths or (workload.prompt_tokens,))
    response, response_variance = _moments(workload.response_lengths or (workload.response_tokens,))
    expected = sequences * (prompt + response) + 2 * math.sqrt(sequences * (prompt_variance + response_variance))
    tokens = max(workload.sequence_tokens, min(expected, sequences * workload.sequence_tokens))
    return tokens * kv_token_bytes(model, generation, workload)


def kv_token_bytes(model: ModelShape, generation: GenerationSpec, workload: WorkloadSpec) -> float:
    """Bytes per rank of one token's keys and values.

    Where gen_tp exceeds the number of KV heads, each rank still holds a whole head.
    """
    tp_share = max(1 / generation.gen_tp_size, 1 / model.num_kv_heads)
    return model.kv_bytes_per_token * workload.element_bytes / 2 * tp_share / generation.gen_pp_size


def _moments(lengths: Sequence[int]) -> tuple[float, float]:
    """Mean and variance."""
    mean = sum(lengths) / len(lengths)
    return mean, sum((length - mean) ** 2 for length in lengths) / len(lengths)


def gathered_weight_bytes(
    model: ModelShape, parallel: ParallelSpec, generation: GenerationSpec, workload: WorkloadSpec, *, backend: str
) -> float:
    """Bytes per rank of generation weights beyond the training shard.

    Nested Megatron layouts keep the shard inside the generation weights (paper, Table 2: redundancy 0); an FSDP shard
    is cut another way, so the generation weights come whole beside it.
    """
    whole = weight_bytes(model, workload)
    peak = whole / generation.replica_size
    return peak if backend == "fsdp" else peak - whole / (parallel.pp_size * parallel.tp_size)


def received_weight_bytes(
    model: ModelShape, parallel: ParallelSpec, generation: GenerationSpec, workload: WorkloadSpec, *, backend: str
) -> float:
    """Bytes per rank received in the train -> generate transition.

    The paper's Table 2 where sizes nest in Megatron's; for FSDP each rank has 1/n of what it needs (exact for
    replicas of one rank, an estimate for larger ones).
    """
    whole = weight_bytes(model, workload)
    if backend == "fsdp":
        return whole / generation.replica_size * (1 - 1 / parallel.world_size)
    return compute_transition_cost(whole, Topology(parallel, generation)).recv_bytes


def estimate_memory(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec,
    workload: WorkloadSpec,
    *,
    calls: Sequence[CallKind],
    generation: GenerationSpec | None = None,
    num_waves: int = 1,
    backend: str | None = None,
) -> Estimate:
    """Bytes of one rank of a model that alone makes ``calls``: its state and its largest call; no latency.

    ``num_waves`` rounds of generation share one KV cache. Compare with ``cluster.machine.gpu.usable_bytes``.
    """
    backend = backend or default_backend(parallel)
    state = state_bytes(model, parallel, workload, trained="training" in calls, backend=backend)
    work = {"activation_bytes": 0.0, "kv_cache_bytes": 0.0, "gathered_weight_bytes": 0.0}
    if "training" in calls:
        work["activation_bytes"] = training_work_bytes(model, parallel, workload, backend=backend)
    if "inference" in calls:
        inference = inference_work_bytes(model, parallel, workload, backend=backend)
        work["activation_bytes"] = max(work["activation_bytes"], inference)
    if generation is not None and "generation" in calls:
        replicas = parallel.world_size // generation.replica_size
        sequences = -(-workload.num_sequences // (replicas * num_waves))
        work["kv_cache_bytes"] = kv_cache_bytes(model, generation, workload, sequences)
        work["gathered_weight_bytes"] = gathered_weight_bytes(model, parallel, generation, workload, backend=backend)
    largest = max(work["activation_bytes"], work["kv_cache_bytes"] + work["gathered_weight_bytes"])
    return Estimate(latency_s=0.0, memory_bytes=sum(state.values()) + largest, breakdown={**state, **work})


def _layer_activation_bytes(model: ModelShape, parallel: ParallelSpec, workload: WorkloadSpec, tokens: int) -> float:
    """What one layer keeps for its backward pass: norms in and out, q, k, v, attention, gate, up, their product."""
    experts = max(1, model.num_experts_per_token)
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shared = (4 * workload.element_bytes + 2 * workload.software.dropout) * model.hidden_size
    cut = (2 * query + 2 * key + 3 * experts * model.intermediate_size) / parallel.tp_size
    return tokens * (shared / _shared_parts(parallel, workload) + cut * workload.element_bytes)


def _kept_bytes(model: ModelShape, parallel: ParallelSpec, workload: WorkloadSpec, tokens: int) -> float:
    """What one layer keeps until its backward pass begins, with recompute.

    Full: its input. Selective: everything but the scores where attention is not fused; else its input, attention's
    output and that of every second multiplication.
    """
    inputs = model.hidden_size / _shared_parts(parallel, workload)
    if workload.recompute == "full":
        return tokens * inputs * workload.element_bytes
    if not workload.software.fused_attention:
        return _layer_activation_bytes(model, parallel, workload, tokens)
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    products = query + 2 * key + 2 * model.hidden_size
    products += 2 * max(1, model.num_experts_per_token) * model.intermediate_size
    return tokens * (inputs + (query + products / 2) / parallel.tp_size) * workload.element_bytes


def _shared_parts(parallel: ParallelSpec, workload: WorkloadSpec) -> int:
    """Into how many parts the tensor group cuts what its ranks would else all hold: norms and residuals."""
    return parallel.tp_size if workload.software.sequence_parallel else 1


def _score_bytes(model: ModelShape, parallel: ParallelSpec, workload: WorkloadSpec, sequences: int) -> float:
    """Probabilities and dropout that attention keeps where it is not fused (Korthikanti et al., 5 a s^2 b)."""
    if workload.software.fused_attention:
        return 0.0
    scores = sequences * model.num_heads * workload.sequence_tokens**2 / parallel.tp_size
    return (workload.element_bytes + (workload.element_bytes + 1) * workload.software.dropout) * scores


def _prefetch_bytes(model: ModelShape, parallel: ParallelSpec, workload: WorkloadSpec, backend: str) -> float:
    """FSDP holds the layer (or matrix, half of an MLP) that computes and the one that is being gathered, whole."""
    if backend != "fsdp" or parallel.world_size == 1:
        return 0.0
    if workload.software.gathers_matrices:
        return 2 * 1.5 * model.hidden_size * model.intermediate_size * workload.element_bytes
    return 2 * weight_bytes(model, workload) / model.num_layers
