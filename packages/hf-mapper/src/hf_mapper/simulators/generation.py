"""Generation: a compute-bound prefill, then one memory-bound decode step per response token (paper, Appendix C).

A decode step reads the rank's weights once (of a mixture, the experts that its tokens choose) and the keys and values
of every running sequence, and multiplies; behind its launches, whichever takes longer, and both where they are close;
its all-reduces and the host's work for each sequence are added. Where responses vary in length, those that end leave
the batch, which decodes until the longest ends. Where the KV cache holds less than the batch, the batch
goes in waves. The reshard of the weights from training to generation comes first.
"""

from __future__ import annotations

import math

from hf_mapper.simulators.communication import all_reduce_s, build_link, point_to_point_s
from hf_mapper.simulators.estimate import Estimate
from hf_mapper.simulators.inference import flops_per_token, simulate_forward
from hf_mapper.simulators.memory import (
    default_backend,
    gathered_weight_bytes,
    kv_cache_bytes,
    kv_token_bytes,
    received_weight_bytes,
    weight_bytes,
)
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import GenerationSpec, ModelShape, ParallelSpec

__all__ = ["simulate_generation", "simulate_rollout", "simulate_transition"]


def simulate_generation(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec,
    workload: WorkloadSpec,
    *,
    generation: GenerationSpec,
    num_waves: int = 1,
    backend: str | None = None,
) -> Estimate:
    """The whole batch, in ``num_waves`` rounds, after the transition from the training layout ``parallel``."""
    backend = backend or default_backend(parallel)
    transition = simulate_transition(model, cluster, parallel, workload, generation=generation, backend=backend)
    rollout = simulate_rollout(
        model, cluster, workload, world_size=parallel.world_size, generation=generation, num_waves=num_waves
    )
    return Estimate(
        latency_s=transition.latency_s + rollout.latency_s,
        memory_bytes=transition.memory_bytes + rollout.memory_bytes,
        breakdown={**transition.breakdown, **rollout.breakdown},
    )


def simulate_transition(
    model: ModelShape,
    cluster: ClusterSpec,
    parallel: ParallelSpec,
    workload: WorkloadSpec,
    *,
    generation: GenerationSpec,
    backend: str,
) -> Estimate:
    """The reshard from ``parallel`` to ``generation``; ``memory_bytes`` is what it adds to the training shard."""
    received = received_weight_bytes(model, parallel, generation, workload, backend=backend)
    gathered = gathered_weight_bytes(model, parallel, generation, workload, backend=backend)
    stride, ranks = (1, parallel.dp_size) if backend == "fsdp" else _micro_dp_group(parallel, generation)
    link = build_link(cluster, num_ranks=ranks, stride=stride, world_size=parallel.world_size)
    seconds = received / link.bandwidth_bytes_per_s + (link.latency_s if ranks > 1 else 0.0)
    return Estimate(latency_s=seconds, memory_bytes=gathered, breakdown={"transition_s": seconds})


def _micro_dp_group(parallel: ParallelSpec, generation: GenerationSpec) -> tuple[int, int]:
    """(stride, ranks) of the groups that gather: inside the tensor group, or over pipeline stages as well."""
    ranks = parallel.pp_size * parallel.tp_size // generation.replica_size
    inside = generation.gen_pp_size == parallel.pp_size
    return (1, ranks) if inside else (parallel.tp_size * parallel.dp_size, ranks)


def simulate_rollout(
    model: ModelShape,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    *,
    world_size: int,
    generation: GenerationSpec,
    num_waves: int = 1,
) -> Estimate:
    """Prefill and decode alone, by ``world_size / (gen_pp * gen_tp)`` replicas; ``memory_bytes`` is the KV cache."""
    replicas = world_size // generation.replica_size
    sequences = -(-workload.num_sequences // (replicas * num_waves))
    layout = ParallelSpec(pp_size=generation.gen_pp_size, tp_size=generation.gen_tp_size)
    prefill_s = num_waves * _prefill_s(model, cluster, layout, workload.typical, sequences)
    decode_s = num_waves * _decode_s(model, cluster, layout, workload, sequences)
    return Estimate(
        latency_s=prefill_s + decode_s,
        memory_bytes=kv_cache_bytes(model, generation, workload, sequences),
        breakdown={"prefill_s": prefill_s, "decode_s": decode_s},
    )


def _prefill_s(
    model: ModelShape, cluster: ClusterSpec, layout: ParallelSpec, workload: WorkloadSpec, sequences: int
) -> float:
    batch = max(1, min(sequences, workload.micro_batch_tokens // workload.prompt_tokens))
    once = simulate_forward(
        model,
        cluster,
        layout,
        workload,
        sequences=batch,
        flops_efficiency=cluster.machine.gpu.efficiency.inference_flops,
        sequence_tokens=workload.prompt_tokens,
        logits=False,
    )
    passes = sequences / batch + layout.pp_size - 1
    return passes * (once.compute_s + once.tensor_parallel_s + once.hop_s)


def _decode_s(
    model: ModelShape, cluster: ClusterSpec, layout: ParallelSpec, workload: WorkloadSpec, sequences: int
) -> float:
    """Every step of one wave, from one length at which responses end to the next."""
    lengths = sorted(workload.response_lengths or (workload.response_tokens,))
    prompt, seconds, begin = workload.typical.prompt_tokens, 0.0, 0
    for ended, end in enumerate(lengths):
        if end > begin:
            running = -(-sequences * (len(lengths) - ended) // len(lengths))
            context = prompt + (begin + end) / 2
            seconds += (end - begin) * _decode_step_s(model, cluster, layout, workload, running, context)
            begin = end
    return seconds


def _decode_step_s(
    model: ModelShape,
    cluster: ClusterSpec,
    layout: ParallelSpec,
    workload: WorkloadSpec,
    sequences: int,
    context: float,
) -> float:
    """One token for each of ``sequences`` with ``context`` tokens before it, over every pipeline stage in turn."""
    gpu = cluster.machine.gpu
    generation = GenerationSpec(gen_pp_size=1, gen_tp_size=layout.tp_size)
    cache = sequences * context * kv_token_bytes(model, generation, workload)
    read_s = (_read_weight_bytes(model, workload, sequences) / layout.tp_size + cache) / (
        gpu.memory_bandwidth_bytes_per_s * gpu.efficiency.memory_bandwidth
    )
    peak = gpu.peak(workload.dtype) * gpu.efficiency.inference_flops
    arithmetic_s = sequences * flops_per_token(model, context) / layout.tp_size / peak
    token_bytes = sequences * model.hidden_size * workload.element_bytes
    tensor = build_link(cluster, num_ranks=layout.tp_size, stride=1, world_size=layout.tp_size)
    reduce_s = 2 * all_reduce_s(tensor, token_bytes)
    stages = build_link(cluster, num_ranks=min(2, layout.pp_size), stride=layout.tp_size, world_size=layout.world_size)
    hops_s = layout.pp_size * point_to_point_s(stages, token_bytes)
    launch_s = model.num_layers * gpu.efficiency.layer_latency_s
    host_s = sequences * gpu.efficiency.sequence_latency_s
    return math.hypot(read_s + arithmetic_s, launch_s) + model.num_layers * reduce_s + hops_s + host_s


def _read_weight_bytes(model: ModelShape, workload: WorkloadSpec, sequences: int) -> float:
    """Weights that one step touches: each token chooses its experts, here at random."""
    whole = weight_bytes(model, workload)
    if not model.num_experts:
        return whole
    experts = 3 * model.num_layers * model.num_experts * model.hidden_size * model.intermediate_size
    untouched = (1 - model.num_experts_per_token / model.num_experts) ** sequences
    return whole - experts * untouched * workload.element_bytes
