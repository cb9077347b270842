"""Generation: a compute-bound prefill, then one memory-bound decode step per response token (paper, Appendix C).

A decode step reads the rank's weights once (of a mixture, the experts that its tokens choose) and the keys and values
of every running sequence, and multiplies. It takes the longer of that and its launches, or both where they are close.
Its all-reduces and the host's work for each sequence are added. Where the KV cache holds less than the batch, the batch
goes in waves. Where responses vary in length, those that end leave their places to those that wait, and the last wave
decodes until its longest ends. The reshard of the weights from training to generation comes first.

The prefill is bound by arithmetic. FLOPs per token and layer: 4 h q + 4 h kv for the projections, 2 S q for causal
attention over S tokens (half of the square), 6 h f for the gated MLP; 2 h V for the logits. q and kv are the widths of
queries and keys, f of the MLP. Its collectives and launches are added.

Expert parallelism inside a replica, where an engine spreads whole experts over the tensor ranks instead of cutting
each, is not distinguished. A rank reads as many bytes, multiplies as much and takes part in as many sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from hf_mapper.simulators.communication import (
    Link,
    all_reduce_s,
    build_link,
    build_stage_link,
    one_shot_reduce_s,
    point_to_point_s,
    round_trip_s,
)
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
from hf_mapper.simulators.memory import (
    computed_parameters,
    expert_parameters,
    gathered_weight_bytes,
    kv_cache_bytes,
    kv_token_bytes,
    received_weight_bytes,
    weight_bytes,
)
from hf_mapper.software import EngineSpec
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import GenerationSpec, ModelShape, ParallelSpec

__all__ = ["flops_per_token", "prefill_s", "simulate_generation"]

_ENGINE = EngineSpec()


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


@overload
def simulate_generation(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec,
    workload: WorkloadSpec,
    *,
    generation: GenerationSpec | None = None,
    num_waves: int = 1,
    backend: str | None = None,
    engine: EngineSpec = _ENGINE,
) -> Estimate[float]: ...
@overload
def simulate_generation(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: Sequence[ParallelSpec],
    workload: WorkloadSpec,
    *,
    generation: GenerationSpec | Sequence[GenerationSpec] | None = None,
    num_waves: int | Sequence[int] = 1,
    backend: str | Sequence[str] | None = None,
    engine: EngineSpec = _ENGINE,
) -> Estimate[NDArray[np.float64]]: ...
def simulate_generation(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec | Sequence[ParallelSpec],
    workload: WorkloadSpec,
    *,
    generation: GenerationSpec | Sequence[GenerationSpec] | None = None,
    num_waves: int | Sequence[int] = 1,
    backend: str | Sequence[str] | None = None,
    engine: EngineSpec = _ENGINE,
) -> Estimate[Any]:
    """The whole batch by every replica in `num_waves` rounds, after the transition from `parallel`.

    `generation` partitions a replica, by default as `parallel` does the model: pp * tp ranks.
    `memory_bytes` is the KV cache, and what the generation weights add to the training shard.
    """
    layouts = read_layouts(model, parallel, backend)
    check_layouts(model, layouts, cluster)
    cut = read_generation(layouts, generation, num_waves)
    replicas = layouts.world_size // cut.replica_size
    sequences = -(-workload.num_sequences // (replicas * cut.num_waves))
    replica = Layouts(
        pp_size=cut.gen_pp_size, tp_size=cut.gen_tp_size, dp_size=1, world_size=cut.replica_size, fsdp=False
    )
    parts: dict[str, Figures] = {
        "transition_s": _transition_s(model, cluster, layouts, cut, workload),
        "prefill_s": cut.num_waves * prefill_s(model, cluster, replica, workload.typical, sequences),
        "decode_s": _decode_s(model, cluster, replica, workload, sequences, cut.num_waves, engine),
    }
    held = gathered_weight_bytes(model, layouts, cut, workload) + kv_cache_bytes(model, cut, workload, sequences)
    return build_estimate(parallel, latency_s=sum(parts.values()), memory_bytes=held, breakdown=parts)


def _transition_s(
    model: ModelShape, cluster: ClusterSpec, layouts: Layouts, generation: GenerationLayouts, workload: WorkloadSpec
) -> Figures:
    """The reshard. FSDP: every generation tensor rank gathers its part over all replicas, in a ring; one replica over
    all ranks.

    Megatron: within the tensor group, or over pipeline stages as well; spread experts from the neighbours that have
    them, who across machines all need the network for themselves.
    """
    replica, world, spread = generation.replica_size, layouts.world_size, layouts.ep_size
    is_alone = replica == world
    within = np.where(generation.gen_pp_size == layouts.pp_size, 1, layouts.tp_size * layouts.dp_size)
    ranks = np.where(layouts.fsdp, np.where(is_alone, world, world // replica), layouts.num_parts // replica)
    stride = np.where(layouts.fsdp, np.where(is_alone, 1, replica), within)
    link = build_link(cluster, num_ranks=ranks, stride=stride, world_size=world)
    expert_link = build_link(cluster, num_ranks=spread, stride=layouts.tp_size, world_size=world, shared_rails=False)
    experts = workload.element_bytes * expert_parameters(model) / layouts.num_parts * (1 - 1 / spread)
    others = received_weight_bytes(model, layouts, generation, workload) - experts
    return _message_s(link, others) + _message_s(expert_link, experts)


def _message_s(link: Link, num_bytes: Figures) -> Figures:
    """Seconds to receive them, after one hop; none where there is nothing to receive."""
    return np.where(num_bytes > 0, link.latency_s + num_bytes / link.bandwidth_bytes_per_s, 0.0)


def _decode_s(
    model: ModelShape,
    cluster: ClusterSpec,
    replica: Layouts,
    workload: WorkloadSpec,
    sequences: Sizes,
    num_waves: Sizes,
    engine: EngineSpec,
) -> Figures:
    """All places taken while sequences wait for one; then the last wave, from one length that ends to the next.

    At a moment when all places are taken, long responses are more likely to run: a place holds E[L^2] / 2 E[L] tokens.
    """
    lengths = sorted(workload.response_lengths or (workload.response_tokens,))
    prompt, begin, mean = workload.typical.prompt_tokens, 0, sum(lengths) / len(lengths)
    held = prompt + sum(length**2 for length in lengths) / len(lengths) / (2 * mean)
    full_s = _decode_step_s(model, cluster, replica, workload, sequences, held, engine)
    seconds = (num_waves - 1) * mean * full_s
    for ended, end in enumerate(lengths):
        if end > begin:
            running = -(-sequences * (len(lengths) - ended) // len(lengths))
            context = prompt + (begin + end) / 2
            seconds += (end - begin) * _decode_step_s(model, cluster, replica, workload, running, context, engine)
            begin = end
    return seconds


def _decode_step_s(
    model: ModelShape,
    cluster: ClusterSpec,
    replica: Layouts,
    workload: WorkloadSpec,
    sequences: Sizes,
    context: float,
    engine: EngineSpec,
) -> Figures:
    """One token for each of `sequences` with `context` tokens before it, over every pipeline stage in turn."""
    gpu = cluster.machine.gpu
    bandwidth = gpu.memory_bandwidth_bytes_per_s * gpu.efficiency.memory_bandwidth
    stages_together = GenerationLayouts(gen_pp_size=1, gen_tp_size=replica.tp_size, num_waves=1)
    cache = sequences * context * kv_token_bytes(model, stages_together, workload)
    read_s = (_read_weight_bytes(model, workload, sequences) / replica.tp_size + cache) / bandwidth
    peak = gpu.peak(workload.dtype) * gpu.efficiency.generation_flops
    arithmetic_s = sequences * flops_per_token(model, context) / replica.tp_size / peak
    token_bytes = sequences * model.hidden_size * workload.element_bytes
    tensor = build_link(cluster, num_ranks=replica.tp_size, stride=1, world_size=replica.tp_size)
    reduce_s = all_reduce_s(tensor, token_bytes)
    if engine.one_shot_reduce:
        reduce_s = np.minimum(reduce_s, one_shot_reduce_s(tensor, token_bytes))
    hops_s = round_trip_s(cluster, replica, token_bytes)
    launch_s = model.num_layers * gpu.efficiency.layer_latency_s
    host_s = sequences * gpu.efficiency.sequence_latency_s
    return np.hypot(read_s + arithmetic_s, launch_s) + 2 * model.num_layers * reduce_s + hops_s + host_s


def _read_weight_bytes(model: ModelShape, workload: WorkloadSpec, sequences: Sizes) -> Figures:
    """Weights that one step touches: each token chooses its experts, here at random."""
    whole = weight_bytes(model, workload)
    if not model.num_experts:
        return whole
    untouched = (1 - model.num_experts_per_token / model.num_experts) ** sequences
    return whole - expert_parameters(model) * untouched * workload.element_bytes
