from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest

from hf_mapper import (
    ClusterSpec,
    EfficiencySpec,
    Estimate,
    MachineSpec,
    WorkloadSpec,
    gpu,
    simulate_generation,
    simulate_inference,
    simulate_training,
)
from hf_mapper.simulators.communication import Link, all_gather_s, all_reduce_s, build_link
from hf_mapper.simulators.generation import flops_per_token
from hf_mapper.software import MEGATRON_2021, ZERO_2021, SoftwareSpec
from hf_protocols import GenerationSpec, ModelShape, ParallelSpec

LLAMA = ModelShape.preset("llama-2-7b")
WORKLOAD = WorkloadSpec(global_batch=1024, prompt_tokens=1024, response_tokens=1024, mini_batches=8)
PEAK, BANDWIDTH = 312e12, 2_039e9


def build_cluster(num_machines: int = 1, **efficiency: float) -> ClusterSpec:
    kind = dataclasses.replace(gpu("a100-80"), efficiency=EfficiencySpec(**efficiency))
    machine = MachineSpec(gpu=kind, num_gpus=8, num_machines=num_machines)
    return ClusterSpec(machines=(machine,), inter_bandwidth_bytes_per_s=25e9)


def layout(text: str) -> ParallelSpec:
    return ParallelSpec.parse(text)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-70b", "llama-3-8b", "mixtral-8x7b"])
def test_a_forward_pass_is_two_flops_per_active_weight(name: str) -> None:
    """Every matrix multiplies once: 2 FLOPs a weight, embeddings looked up and not multiplied, attention aside."""
    model = ModelShape.preset(name)
    matrices = sum(
        shape[0] * shape[1]
        for parameter, shape in model.parameters().items()
        if len(shape) == 2 and "embed" not in parameter and ".experts." not in parameter
    )
    experts = sum(shape[0] * shape[1] for key, shape in model.parameters().items() if ".experts." in key)
    active = experts * model.num_experts_per_token / model.num_experts if model.num_experts else 0
    assert flops_per_token(model, 0) == pytest.approx(2 * (matrices + active))
    attention = flops_per_token(model, 1000) - flops_per_token(model, 0)
    assert attention == model.num_layers * 2 * (2 * 1000 * model.num_heads * model.head_dim)


def build_arithmetic_cluster(**efficiency: float) -> ClusterSpec:
    """Machines whose memory costs no time and whose kernels need no launch."""
    cluster = build_cluster(training_flops=0.5, training_latency_s=0.0, **efficiency)
    kind = dataclasses.replace(cluster.machine.gpu, memory_bandwidth_bytes_per_s=1e30)
    return dataclasses.replace(cluster, machines=(dataclasses.replace(cluster.machine, gpu=kind),))


def test_inference_is_bound_by_arithmetic() -> None:
    tokens = 1024 * 2048
    ideal_s = tokens * flops_per_token(LLAMA, 1024) / (8 * PEAK * 0.5)
    estimate = simulate_inference(LLAMA, build_arithmetic_cluster(), layout("1-1-8"), WORKLOAD, backend="megatron")
    assert estimate.latency_s == pytest.approx(ideal_s)
    assert estimate.latency_s == pytest.approx(sum(estimate.breakdown.values()))


@pytest.mark.parametrize("software", [SoftwareSpec(), MEGATRON_2021])
@pytest.mark.parametrize("text", ["1-1-8", "1-8-1", "2-2-2"])
def test_a_forward_pass_is_a_third_of_forward_and_backward(text: str, software: SoftwareSpec) -> None:
    """The model is the trained one: equal kernels and launches, half of the sums, hops, and a third of the gathers."""
    workload = dataclasses.replace(WORKLOAD, recompute="none", mini_batches=1, software=software)
    cluster = build_cluster(half_size=100.0, training_latency_s=1e-3)
    passed, trained = (
        simulate(LLAMA, cluster, layout(text), workload).breakdown
        for simulate in (simulate_inference, simulate_training)
    )
    parts = {
        "compute_s": 3, "logits_s": 3, "tensor_parallel_s": 2, "expert_parallel_s": 2, "pipeline_hop_s": 2,
        "exposed_gather_s": 3,
    }  # fmt: skip
    assert passed.keys() == parts.keys()
    assert {name: factor * passed[name] for name, factor in parts.items()} == pytest.approx(
        {name: trained[name] for name in parts}
    )


@pytest.mark.parametrize(("recompute", "forwards"), [("none", 3), ("full", 4)])
def test_training_computes_three_forwards_or_four_with_recompute(recompute: str, forwards: int) -> None:
    """Of the layers; logits are not computed again. 2048 causal tokens attend to 1024 on average."""
    workload = dataclasses.replace(WORKLOAD, recompute=recompute, epochs=2)
    training = simulate_training(LLAMA, build_arithmetic_cluster(), layout("1-1-8"), workload)
    tokens_per_flop_s = 2 * 1024 * 2048 / (8 * PEAK * 0.5)
    layers = forwards * flops_per_token(LLAMA, 1024, logits=False)
    assert training.breakdown["compute_s"] == pytest.approx(tokens_per_flop_s * layers)
    assert training.breakdown["logits_s"] == pytest.approx(tokens_per_flop_s * 3 * 2 * 4096 * 32000)
    assert training.latency_s == pytest.approx(sum(training.breakdown.values()))


def test_selective_recompute_repeats_attention_or_half() -> None:
    """Unfused attention costs 4 S q FLOPs a token, with no mask skipped; its core alone is computed again."""
    old = dataclasses.replace(WORKLOAD, recompute="selective", software=MEGATRON_2021)
    cluster, per_flop_s = build_arithmetic_cluster(), 1024 * 2048 / (8 * PEAK * 0.5)
    linear, core = flops_per_token(LLAMA, 0, logits=False), 32 * 4 * 2048 * 4096
    unfused = simulate_training(LLAMA, cluster, layout("1-1-8"), old).breakdown["compute_s"]
    assert unfused == pytest.approx(per_flop_s * (3 * linear + 4 * core))
    fused = simulate_training(LLAMA, cluster, layout("1-1-8"), dataclasses.replace(WORKLOAD, recompute="selective"))
    assert fused.breakdown["compute_s"] == pytest.approx(per_flop_s * (3.5 * linear + 3 * core / 2))


def test_small_layers_take_as_long_as_their_launches() -> None:
    tiny = dataclasses.replace(LLAMA, hidden_size=64, intermediate_size=64, num_heads=1, num_kv_heads=1, head_dim=64)
    workload = WorkloadSpec(global_batch=8, prompt_tokens=4, response_tokens=4, recompute="none")
    estimate = simulate_training(tiny, build_cluster(training_latency_s=1e-3), layout("1-1-8"), workload)
    assert estimate.breakdown["compute_s"] == pytest.approx(3 * 32 * 1e-3)


def test_interleaving_divides_the_bubble_and_repeats_the_hops() -> None:
    cluster, spec = build_cluster(2), layout("8-2-1")
    workload = dataclasses.replace(WORKLOAD, mini_batches=1, micro_batch_tokens=2048, global_batch=32)
    plain, cut = (
        simulate_training(LLAMA, cluster, spec, dataclasses.replace(workload, pipeline_chunks=chunks)).breakdown
        for chunks in (1, 2)
    )
    assert cut["compute_s"] / plain["compute_s"] == pytest.approx((32 + 7 / 2) / (32 + 7))
    assert cut["pipeline_hop_s"] / plain["pipeline_hop_s"] == pytest.approx(2 * (32 + 7 / 2) / (32 + 7))
    assert cut["logits_s"] == plain["logits_s"]


def test_measured_training_runs_are_met_within_a_factor_of_two() -> None:
    """llm-foundry, MPT-7B by FSDP on 8 A100: 35.6 s. vTrain, GPT 18.4B as 8-1-32 on 256 A100: 12.4 s a step."""
    small = dataclasses.replace(LLAMA, vocab_size=50368, max_positions=4096)
    workload = WorkloadSpec(global_batch=256, prompt_tokens=2048, response_tokens=2048, micro_batch_tokens=16 * 4096)
    fsdp = simulate_training(small, build_cluster(), layout("1-1-8"), workload)
    assert 0.5 < fsdp.latency_s / 35.58 < 2

    large = ModelShape(
        name="gpt-18b",
        num_layers=40,
        hidden_size=6144,
        intermediate_size=16384,
        num_heads=48,
        num_kv_heads=48,
        head_dim=128,
        vocab_size=51200,
    )
    workload = WorkloadSpec(global_batch=1024, prompt_tokens=1024, response_tokens=1024, micro_batch_tokens=4 * 2048)
    megatron = simulate_training(large, build_cluster(32), layout("8-1-32"), workload)
    assert 0.5 < megatron.latency_s / 12.379 < 2


def test_the_pipeline_bubble_is_its_depth_less_one() -> None:
    cluster = build_cluster(layer_latency_s=0.0)
    workload = dataclasses.replace(WORKLOAD, mini_batches=1, micro_batch_tokens=2048)
    shallow = simulate_inference(LLAMA, cluster, layout("1-2-4"), workload).breakdown["compute_s"]
    deep = simulate_inference(LLAMA, cluster, layout("4-2-1"), workload).breakdown["compute_s"]
    assert deep / shallow == pytest.approx((1024 + 3) / 1024)


def test_tensor_parallelism_costs_two_all_reduces_a_layer() -> None:
    cluster, workload = build_cluster(), dataclasses.replace(WORKLOAD, global_batch=8, mini_batches=1)
    estimate = simulate_inference(LLAMA, cluster, layout("1-8-1"), workload)
    link = build_link(cluster, num_ranks=8, stride=1, world_size=8)
    micro_batches, tokens = 2, 4 * 2048
    expected = micro_batches * 2 * 32 * all_reduce_s(link, tokens * 4096 * 2)
    assert estimate.breakdown["tensor_parallel_s"] == pytest.approx(expected)


def test_fsdp_waits_for_weights_only_if_computing_is_shorter() -> None:
    """Transfers that computing hides slow it down by 0.6 of their time; inside a machine an update has four of each."""
    inside = simulate_training(LLAMA, build_cluster(), layout("1-1-8"), WORKLOAD)
    across = simulate_training(LLAMA, build_cluster(16), layout("1-1-128"), WORKLOAD)
    copies_s = 8 * 4 * 3 * 2 * LLAMA.num_parameters * 7 / 8 / (0.71 * 300e9)
    latency_s = 8 * 4 * 3 * 3 * 1.25e-5
    assert inside.breakdown["exposed_gather_s"] == pytest.approx(0.6 * (copies_s + latency_s))
    # One sequence a rank, so every update gathers the weights three times over the network.
    gathers_s = 8 * 3 * 2 * LLAMA.num_parameters / (0.71 * 25e9) * 127 / 128
    waited = sum(across.breakdown[name] for name in ("exposed_gather_s", "compute_s", "logits_s"))
    assert waited == pytest.approx(gathers_s, rel=0.01)


def test_ranks_without_shared_rails_receive_everything() -> None:
    old = dataclasses.replace(WORKLOAD, software=ZERO_2021)
    parts = simulate_training(LLAMA, build_cluster(16), layout("1-1-128"), old).breakdown
    gathers_s = 8 * 3 * 2 * LLAMA.num_parameters / (0.71 * 25e9 / 8) * 127 / 128
    waited = sum(parts[name] for name in ("exposed_gather_s", "compute_s", "logits_s"))
    assert waited == pytest.approx(gathers_s, rel=0.01)


def test_megatron_reduces_gradients_once_an_update() -> None:
    more = dataclasses.replace(WORKLOAD, mini_batches=16)
    few, many = (simulate_training(LLAMA, build_cluster(2), layout("1-8-2"), workload) for workload in (WORKLOAD, more))
    assert few.breakdown["gradient_sync_s"] > 0
    assert many.breakdown["gradient_sync_s"] == pytest.approx(2 * few.breakdown["gradient_sync_s"])
    assert simulate_training(LLAMA, build_cluster(), layout("1-8-1"), WORKLOAD).breakdown["gradient_sync_s"] == 0


def test_spread_experts_are_summed_over_their_copies_only() -> None:
    """Data-parallel ranks with different experts sum none of them; with two copies, half as many twice."""
    mixtral, cluster = ModelShape.preset("mixtral-8x7b"), build_cluster(2)
    experts = 3 * 32 * 8 * 4096 * 14336
    link = build_link(cluster, num_ranks=8, stride=2, world_size=16)
    pair = build_link(cluster, num_ranks=2, stride=8, world_size=16)

    def sync_s(ep_size: int) -> float:
        spread = dataclasses.replace(layout("1-2-8"), ep_size=ep_size)
        return simulate_training(mixtral, cluster, spread, WORKLOAD).breakdown["gradient_sync_s"]

    def gathers_s(link: Link, parameters: float) -> float:
        return float(all_gather_s(link, 4 * parameters) + all_gather_s(link, 2 * parameters))

    shared_s = gathers_s(link, (mixtral.num_parameters - experts) / 2)
    assert sync_s(1) == pytest.approx(8 * gathers_s(link, mixtral.num_parameters / 2))
    assert sync_s(8) == pytest.approx(8 * shared_s)
    assert sync_s(4) == pytest.approx(8 * (shared_s + gathers_s(pair, experts / 2 / 4)))


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("selective", 2), ("full", 3)])
def test_training_sends_tokens_to_experts_in_every_layer(recompute: str, passes: int) -> None:
    mixtral, cluster = ModelShape.preset("mixtral-8x7b"), build_cluster()
    workload = dataclasses.replace(WORKLOAD, recompute=recompute)
    spread = ParallelSpec(dp_size=8, ep_size=8)
    micro_batches, tokens = 1024 // 8 // 4, 4 * 2048
    copies = tokens * 2 * 4096 * 2 * 7 / 8
    once_s = 32 * 2 * (1.25e-5 + copies / (0.71 * 300e9))
    trained = simulate_training(mixtral, cluster, spread, workload).breakdown["expert_parallel_s"]
    assert trained == pytest.approx(micro_batches * passes * once_s)
    read = simulate_inference(mixtral, cluster, spread, workload).breakdown["expert_parallel_s"]
    assert read == pytest.approx(micro_batches * once_s)


def test_spread_experts_need_fewer_larger_multiplications() -> None:
    mixtral = ModelShape.preset("mixtral-8x7b")
    layouts = [ParallelSpec(dp_size=8), ParallelSpec(dp_size=8, ep_size=8)]
    perfect = simulate_training(mixtral, build_arithmetic_cluster(), layouts, WORKLOAD, backend="megatron")
    assert perfect.breakdown["compute_s"][1] == pytest.approx(perfect.breakdown["compute_s"][0])
    small = simulate_training(mixtral, build_cluster(half_size=500.0), layouts, WORKLOAD, backend="megatron")
    assert small.breakdown["compute_s"][1] < 0.95 * small.breakdown["compute_s"][0]


def test_fsdp_gathers_experts_of_the_fullest_rank() -> None:
    """Eight experts over sixteen ranks are gathered as sixteen, and in the transition, which has names, as eight."""
    mixtral, cluster, layouts = ModelShape.preset("mixtral-8x7b"), build_cluster(2), layout("1-1-16")
    experts = sum(math.prod(shape) for name, shape in mixtral.parameters().items() if ".experts." in name)
    link = build_link(cluster, num_ranks=16, stride=1, world_size=16)
    workload = dataclasses.replace(WORKLOAD, global_batch=16, mini_batches=1, prompt_tokens=16, response_tokens=16)
    gathered_s = float(all_gather_s(link, 2 * (mixtral.num_parameters + experts)))
    passed = simulate_inference(mixtral, cluster, layouts, workload, backend="fsdp").breakdown
    computing_s = passed["compute_s"] + passed["logits_s"]
    assert passed["exposed_gather_s"] + computing_s == pytest.approx(gathered_s)
    trained = simulate_training(mixtral, cluster, layouts, workload, backend="fsdp").breakdown
    computing_s = trained["compute_s"] + trained["logits_s"]
    assert trained["exposed_gather_s"] + computing_s == pytest.approx(3 * gathered_s)
    found = simulate_generation(mixtral, cluster, layouts, workload, generation=GenerationSpec())
    moved = found.breakdown["transition_s"] * 0.71 * 25e9
    assert moved == pytest.approx(2 * mixtral.num_parameters * 15 / 16, rel=1e-3)


@pytest.mark.parametrize("simulate", [simulate_inference, simulate_training])
def test_more_ranks_are_faster_but_never_superlinear(simulate: Callable[..., Estimate[float]]) -> None:
    times = [simulate(LLAMA, build_cluster(16), layout(f"1-8-{dp}"), WORKLOAD).latency_s for dp in (1, 2, 4, 8, 16)]
    assert times == sorted(times, reverse=True)
    assert all(2 * later >= earlier * 0.999 for earlier, later in itertools.pairwise(times))


def test_lengths_that_do_not_vary_change_nothing() -> None:
    same = dataclasses.replace(WORKLOAD, prompt_lengths=(1024,), response_lengths=(1024, 1024))
    cluster, generation = build_cluster(), GenerationSpec(gen_tp_size=2)
    for simulate in (simulate_training, simulate_inference):
        assert simulate(LLAMA, cluster, layout("1-2-4"), same) == simulate(LLAMA, cluster, layout("1-2-4"), WORKLOAD)
    found, expected = (
        simulate_generation(LLAMA, cluster, layout("1-2-4"), workload, generation=generation)
        for workload in (same, WORKLOAD)
    )
    assert found == expected


def test_shorter_sequences_take_less_time_and_cache() -> None:
    cluster, generation = build_cluster(), GenerationSpec(gen_tp_size=1)
    ragged = dataclasses.replace(WORKLOAD, response_lengths=(128, 256, 512, 1024))
    for simulate in (simulate_training, simulate_inference):
        short, full = (simulate(LLAMA, cluster, layout("1-1-8"), one) for one in (ragged, WORKLOAD))
        assert short.latency_s < full.latency_s
        assert short.memory_bytes >= 0.99 * full.memory_bytes, "the longest may come together"
    short, full = (
        simulate_generation(LLAMA, cluster, layout("1-1-8"), one, generation=generation) for one in (ragged, WORKLOAD)
    )
    assert short.latency_s < full.latency_s
    assert short.memory_bytes < full.memory_bytes
