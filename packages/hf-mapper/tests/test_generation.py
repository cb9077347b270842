"""Seconds of a generation, computed by hand: its steps, its waves, its sums, and the transition before it."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from hf_mapper import (
    ClusterSpec,
    EfficiencySpec,
    EngineSpec,
    MachineSpec,
    WorkloadSpec,
    gpu,
    simulate_generation,
)
from hf_mapper.simulators.communication import all_reduce_s, build_link, one_shot_reduce_s
from hf_mapper.simulators.generation import flops_per_token
from hf_mapper.simulators.memory import kv_cache_bytes
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


@pytest.mark.parametrize(
    ("name", "num_ranks", "tokens_per_s"),
    [("llama-2-7b", 1, 3024.07), ("llama-2-70b", 4, 1159.84)],
)
def test_measured_generation_runs_are_met_within_a_factor_of_two(
    name: str, num_ranks: int, tokens_per_s: float
) -> None:
    """LMDeploy on A100-80GB: a batch of 64, prompts and responses of 128 tokens."""
    workload = WorkloadSpec(global_batch=64, prompt_tokens=128, response_tokens=128)
    estimate = simulate_generation(
        ModelShape.preset(name),
        build_cluster(),
        layout(f"1-{num_ranks}-1"),
        workload,
        generation=GenerationSpec(gen_tp_size=num_ranks),
    )
    assert 0.5 < estimate.latency_s / (64 * 128 / tokens_per_s) < 2


def test_decoding_reads_weights_and_cache_for_every_token() -> None:
    cluster = build_cluster(layer_latency_s=0.0, memory_bandwidth=1.0)
    workload = WorkloadSpec(global_batch=8, prompt_tokens=1024, response_tokens=1024)
    estimate = simulate_generation(LLAMA, cluster, layout("1-1-8"), workload, generation=GenerationSpec())
    cache_per_token = 2 * 32 * 4096 * 2
    read_s = (2 * LLAMA.num_parameters + (1024 + 512) * cache_per_token) / BANDWIDTH
    step_s = read_s + flops_per_token(LLAMA, 1024 + 512) / (PEAK * 0.7)
    assert estimate.breakdown["decode_s"] == pytest.approx(1024 * step_s)
    assert estimate.memory_bytes == pytest.approx(2048 * cache_per_token + 2 * LLAMA.num_parameters)


def test_waves_shrink_the_cache_and_repeat_the_weights() -> None:
    cluster = build_cluster()
    once, thrice = (
        simulate_generation(
            LLAMA, cluster, layout("1-8-1"), WORKLOAD, generation=GenerationSpec(gen_tp_size=8), num_waves=waves
        )
        for waves in (1, 4)
    )
    assert once.memory_bytes == pytest.approx(4 * thrice.memory_bytes)
    assert once.breakdown["decode_s"] < thrice.breakdown["decode_s"] < 4 * once.breakdown["decode_s"]


def test_transition_is_free_for_equal_layouts_else_the_papers() -> None:
    """Figure 14 at 13B: training 1-8-1 to generation 1-4 receives 3.25 GB a rank."""
    model, cluster = ModelShape.preset("llama-2-13b"), build_cluster()
    same = simulate_generation(model, cluster, layout("1-8-1"), WORKLOAD, generation=GenerationSpec(gen_tp_size=8))
    half = simulate_generation(model, cluster, layout("1-8-1"), WORKLOAD, generation=GenerationSpec(gen_tp_size=4))
    assert same.breakdown["transition_s"] == 0
    assert half.breakdown["transition_s"] * 0.71 * 300e9 == pytest.approx(3.25e9, rel=0.01)


@pytest.mark.parametrize("gen_tp", [1, 2, 4, 8])
def test_machine_receives_a_whole_model_for_any_replicas(gen_tp: int) -> None:
    """FSDP over two machines, in rings: all of the model but a ring's own part passes from one to the other."""
    cluster, generation = build_cluster(2), GenerationSpec(gen_tp_size=gen_tp)
    found = simulate_generation(LLAMA, cluster, layout("1-1-16"), WORKLOAD, generation=generation)
    moved = found.breakdown["transition_s"] * 0.71 * 25e9
    assert moved == pytest.approx(2 * LLAMA.num_parameters * 15 / 16, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "bandwidth"), [("1-1-8", 300e9), ("1-2-8", 25e9 / 8)], ids=["in a machine", "across two, all at once"]
)
def test_spread_experts_come_from_those_that_have_them(text: str, bandwidth: float) -> None:
    """Eight experts over eight ranks: seven eighths of a rank's part of them come from its expert group."""
    mixtral, spec = ModelShape.preset("mixtral-8x7b"), dataclasses.replace(layout(text), ep_size=8)
    experts = sum(math.prod(shape) for name, shape in mixtral.parameters().items() if ".experts." in name)
    found = simulate_generation(
        mixtral, build_cluster(2), spec, WORKLOAD, generation=GenerationSpec(gen_tp_size=spec.tp_size)
    )
    moved = 2 * experts / spec.tp_size * 7 / 8
    assert found.breakdown["transition_s"] == pytest.approx(moved / (0.71 * bandwidth), rel=1e-3)


def test_longer_pipelines_in_generation_do_not_speed_up_one_step() -> None:
    cluster, workload = build_cluster(), dataclasses.replace(WORKLOAD, global_batch=64)
    flat = simulate_generation(LLAMA, cluster, layout("1-2-4"), workload, generation=GenerationSpec(gen_tp_size=2))
    deep = simulate_generation(
        LLAMA, cluster, layout("4-2-1"), workload, generation=GenerationSpec(gen_pp_size=4, gen_tp_size=2)
    )
    assert deep.breakdown["decode_s"] > flat.breakdown["decode_s"]


def test_one_shot_reduce_takes_one_hop_for_small_sums() -> None:
    """Of 8 ranks: a ring has two passes of log2(8) hops, one shot has one hop and 7 times the bytes."""
    cluster = build_cluster()
    link = build_link(cluster, num_ranks=8, stride=1, world_size=8)
    assert one_shot_reduce_s(link, 1e6) == pytest.approx(1.25e-5 + 7e6 / 213e9)
    assert one_shot_reduce_s(build_link(cluster, num_ranks=1, stride=1, world_size=8), 1e6) == 0
    seconds = {}
    for batch in (16, 8192):
        workload = WorkloadSpec(global_batch=batch, prompt_tokens=16, response_tokens=16)
        seconds[batch] = [
            simulate_generation(
                LLAMA, cluster, layout("1-8-1"), workload, generation=GenerationSpec(gen_tp_size=8), engine=engine
            ).breakdown["decode_s"]
            for engine in (EngineSpec(one_shot_reduce=False), EngineSpec())
        ]
    token_bytes = 16 * 4096 * 2
    saved_s = all_reduce_s(link, token_bytes) - one_shot_reduce_s(link, token_bytes)
    assert seconds[16][0] - seconds[16][1] == pytest.approx(16 * 2 * 32 * saved_s)
    assert seconds[8192][0] == seconds[8192][1]


def test_a_mixture_reads_the_experts_that_its_tokens_choose() -> None:
    """Two of eight experts for one token; of many tokens nearly all; and other costs as in a dense model."""
    model = ModelShape.preset("mixtral-8x7b")
    cluster = build_cluster(layer_latency_s=0.0, memory_bandwidth=1.0, generation_flops=1.0)
    experts = 2 * 32 * 8 * 3 * 4096 * 14336
    steps = {}
    for batch in (1, 64):
        workload = WorkloadSpec(global_batch=batch, prompt_tokens=1, response_tokens=1)
        step_s = simulate_generation(model, cluster, layout("1-1-1"), workload, generation=GenerationSpec()).breakdown[
            "decode_s"
        ]
        cache = batch * 1.5 * 2 * 32 * 1024 * 2
        steps[batch] = (step_s - batch * flops_per_token(model, 1.5) / PEAK) * BANDWIDTH - cache
    rest = 2 * model.num_parameters - experts
    assert steps[1] == pytest.approx(rest + experts / 4)
    assert steps[64] == pytest.approx(rest + experts, rel=1e-6)


def test_ragged_responses_decode_until_the_longest_ends() -> None:
    """Launches are free here: every step reads the weights once and the tokens of those that have not ended."""
    lengths = (100, 400, 400, 1000)
    ragged = dataclasses.replace(WORKLOAD, global_batch=64, response_tokens=1000, response_lengths=lengths)
    cluster = build_cluster(layer_latency_s=0.0, generation_flops=1.0, memory_bandwidth=1.0)
    found = simulate_generation(LLAMA, cluster, layout("1-1-1"), ragged, generation=GenerationSpec()).breakdown
    expected_s = 0.0
    for step in range(1000):
        running = 64 * sum(length > step for length in lengths) // 4
        context = 1024 + step + 0.5
        read = 2 * LLAMA.num_parameters + running * context * (2 * 2 * 32 * 4096)
        expected_s += read / BANDWIDTH + running * flops_per_token(LLAMA, context) / PEAK
    assert found["decode_s"] == pytest.approx(expected_s, rel=1e-6)


def test_ragged_waves_take_places_as_they_become_free() -> None:
    """Against every step of 256 sequences on 64 places, in a drawn order; equal lengths go round after round."""
    lengths, places = (100, 400, 400, 1000), 64
    cluster = build_cluster(layer_latency_s=0.0, generation_flops=1.0, memory_bandwidth=1.0)
    ragged = dataclasses.replace(WORKLOAD, global_batch=256, response_tokens=1000, response_lengths=lengths)
    found = simulate_generation(
        LLAMA, cluster, layout("1-1-1"), ragged, generation=GenerationSpec(), num_waves=4
    ).breakdown["decode_s"]
    waiting = list(lengths) * 64
    random.Random(1).shuffle(waiting)
    running: list[list[int]] = []
    expected_s = 0.0
    while waiting or running:
        running += [[0, waiting.pop()] for _ in range(min(places - len(running), len(waiting)))]
        read = 2 * LLAMA.num_parameters + sum(1024 + done + 0.5 for done, _ in running) * (2 * 2 * 32 * 4096)
        flops = sum(flops_per_token(LLAMA, 1024 + done + 0.5) for done, _ in running)
        expected_s += read / BANDWIDTH + flops / PEAK
        running = [[done + 1, length] for done, length in running if done + 1 < length]
    assert found == pytest.approx(expected_s, rel=0.1)

    equal = dataclasses.replace(ragged, response_lengths=())
    one, four = (
        simulate_generation(
            LLAMA, cluster, layout("1-1-1"), dataclasses.replace(equal, global_batch=batch),
            generation=GenerationSpec(), num_waves=waves,
        ).breakdown["decode_s"]
        for batch, waves in ((64, 1), (256, 4))
    )  # fmt: skip
    assert four == pytest.approx(4 * one)


def test_a_ragged_cache_holds_nearly_every_draw() -> None:
    """Two standard deviations: of drawn batches about 2 % need more."""
    lengths = (16, 64, 256, 1024)
    ragged = dataclasses.replace(WORKLOAD, response_lengths=lengths)
    capacity = kv_cache_bytes(LLAMA, GenerationSpec(), ragged, 64) / (2 * 2 * 32 * 4096)
    chance = random.Random(1)
    needs = [sum(1024 + chance.choice(lengths) for _ in range(64)) for _ in range(2000)]
    assert 0 < sum(need > capacity for need in needs) / len(needs) < 0.04
    ragged = dataclasses.replace(WORKLOAD, response_lengths=(16,) * 99 + (1024,))
    assert kv_cache_bytes(LLAMA, GenerationSpec(), ragged, 1) == kv_cache_bytes(LLAMA, GenerationSpec(), WORKLOAD, 1)
