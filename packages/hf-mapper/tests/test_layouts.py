from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from hf_mapper import (
    ClusterSpec,
    EfficiencySpec,
    EngineSpec,
    Estimate,
    MachineSpec,
    WorkloadSpec,
    estimate_memory,
    gpu,
    simulate_generation,
    simulate_inference,
    simulate_training,
)
from hf_mapper.simulators.layouts import GenerationLayouts, Layouts
from hf_mapper.simulators.memory import received_weight_bytes, weight_bytes
from hf_mapper.software import MEGATRON_2021, ZERO_2021
from hf_protocols import (
    ConfigError,
    GenerationSpec,
    ModelShape,
    ParallelSpec,
    Topology,
    TopologyError,
    compute_transition_cost,
)

GOLDEN = Path(__file__).parent / "golden" / "simulators.json"
"""The simulators' results when their formulas last changed, in seconds and bytes: `describe` of every problem."""

ENGINE = EngineSpec(one_shot_reduce=False)
CALLS = ("training", "inference", "generation")
WORKLOAD = WorkloadSpec(global_batch=1024, prompt_tokens=1024, response_tokens=1024, mini_batches=8)
ONE_MACHINE = ("1-1-8", "1-8-1", "2-2-2", "8-1-1", "1-2-4")
MANY_MACHINES = ("1-1-128", "4-8-4", "8-2-8", "1-8-16", "16-1-8", "2-4-16", "1-2-64")


class LayoutProblem(NamedTuple):
    model: ModelShape
    cluster: ClusterSpec
    workload: WorkloadSpec
    layouts: tuple[str, ...]


def draw(preset: str, num_machines: int, layouts: tuple[str, ...] = MANY_MACHINES, **changes: object) -> LayoutProblem:
    kind = dataclasses.replace(gpu("a100-80"), efficiency=EfficiencySpec(half_size=100.0, sequence_latency_s=1e-5))
    machine = MachineSpec(gpu=kind, num_gpus=8, num_machines=num_machines)
    cluster = ClusterSpec(machines=(machine,), inter_bandwidth_bytes_per_s=25e9)
    return LayoutProblem(ModelShape.preset(preset), cluster, dataclasses.replace(WORKLOAD, **changes), layouts)


PROBLEMS = {
    "one machine": draw("llama-2-7b", 1, ONE_MACHINE),
    "many machines": draw("llama-2-7b", 16),
    "a mixture": draw("mixtral-8x7b", 16),
    "few key-value heads": draw("qwen2-7b", 16, ("1-1-128", "4-4-8", "1-4-32", "2-2-32"), recompute="none"),
    "Megatron of 2021": draw("llama-2-7b", 16, recompute="selective", software=MEGATRON_2021),
    "ZeRO-3 of 2021": draw("llama-2-7b", 16, ("1-1-128", "1-1-64", "1-1-8"), software=ZERO_2021),
    "interleaved": draw("llama-2-7b", 16, recompute="selective", pipeline_chunks=2, micro_batch_tokens=2048),
    "ragged": draw("llama-2-7b", 16, prompt_lengths=(512, 1024), response_lengths=(128, 256, 1024)),
}


def replica(text: str) -> GenerationSpec:
    """The same tensor group where it is cut, half of the pipeline."""
    spec = ParallelSpec.parse(text)
    if spec.pp_size == spec.tp_size == 1:
        return GenerationSpec(gen_tp_size=2)
    return GenerationSpec(gen_pp_size=max(1, spec.pp_size // 2), gen_tp_size=spec.tp_size)


def ask(problem: LayoutProblem, layouts: list[str] | str, waves: int | list[int]) -> dict[str, Estimate]:
    """Every simulator's answer, for one layout or for several."""
    spec, generation = (
        read(layouts) if isinstance(layouts, str) else list(map(read, layouts))
        for read in (ParallelSpec.parse, replica)
    )
    given, rollout = (problem.model, problem.cluster, spec, problem.workload), {"generation": generation}
    return {
        "training": simulate_training(*given),
        "inference": simulate_inference(*given),
        "generation": simulate_generation(*given, **rollout, num_waves=waves, engine=ENGINE),
        "memory": estimate_memory(*given, calls=CALLS, **rollout, num_waves=waves),
    }


def waves_of(problem: LayoutProblem) -> list[int]:
    """Every second layout generates in four waves, where lengths do not vary."""
    return [1 if problem.workload.response_lengths else 1 + 3 * (index % 2) for index in range(len(problem.layouts))]


def describe(problem: LayoutProblem) -> dict[str, list[list[float]]]:
    """Seconds and bytes of each simulator in each layout."""
    answers = [ask(problem, *given) for given in zip(problem.layouts, waves_of(problem), strict=True)]
    return {
        name: [[answer[name].latency_s, answer[name].memory_bytes] for answer in answers] for name in (*CALLS, "memory")
    }


@pytest.mark.parametrize("name", PROBLEMS)
def test_one_layout_costs_what_it_did(name: str) -> None:
    found, golden = describe(PROBLEMS[name]), json.loads(GOLDEN.read_text())[name]
    assert found.keys() == golden.keys()
    for simulator, figures in golden.items():
        np.testing.assert_allclose(found[simulator], figures, rtol=1e-9, err_msg=simulator)


@pytest.mark.parametrize("name", PROBLEMS)
def test_many_layouts_cost_what_each_does_alone(name: str) -> None:
    problem = PROBLEMS[name]
    waves = waves_of(problem)
    together = ask(problem, list(problem.layouts), waves)
    for index, layout in enumerate(problem.layouts):
        for simulator, alone in ask(problem, layout, waves[index]).items():
            batch = together[simulator]
            assert isinstance(alone.latency_s, float)
            assert batch.latency_s[index] == pytest.approx(alone.latency_s, rel=1e-12)
            assert batch.memory_bytes[index] == pytest.approx(alone.memory_bytes, rel=1e-12)
            parts = {part: figure[index] for part, figure in batch.breakdown.items()}
            assert parts == pytest.approx(dict(alone.breakdown), rel=1e-12)


def test_the_backend_is_of_all_layouts_or_of_each() -> None:
    problem = PROBLEMS["one machine"]
    given, specs = (problem.model, problem.cluster), [ParallelSpec(dp_size=8), ParallelSpec(dp_size=8)]
    each = simulate_training(*given, specs, problem.workload, backend=["megatron", "fsdp"]).memory_bytes
    for index, backend in enumerate(("megatron", "fsdp")):
        every = simulate_training(*given, specs, problem.workload, backend=backend).memory_bytes
        assert every[0] == every[1] == each[index]
    assert each[0] != each[1]


def test_no_layouts_have_no_times() -> None:
    problem = PROBLEMS["one machine"]
    assert simulate_training(problem.model, problem.cluster, [], problem.workload).latency_s.shape == (0,)


def test_layouts_need_one_backend_wave_and_generation_each() -> None:
    problem = PROBLEMS["one machine"]
    given = (problem.model, problem.cluster, [ParallelSpec(dp_size=8)] * 3, problem.workload)
    with pytest.raises(ConfigError, match=r"backend: 2 given for 3 layouts\. Pass one for all or one for each"):
        simulate_training(*given, backend=["fsdp", "fsdp"])
    with pytest.raises(ConfigError, match="num_waves: 2 given for 3 layouts"):
        simulate_generation(*given, generation=GenerationSpec(), num_waves=[1, 2])
    with pytest.raises(ConfigError, match="generation: 1 given for 3 layouts"):
        simulate_generation(*given, generation=[GenerationSpec()])


@pytest.mark.parametrize(
    ("preset", "ep", "backend", "message"),
    [
        ("llama-2-7b", 2, "megatron", "llama-2-7b has no experts to spread over ep_size=2. Use ep_size=1"),
        ("mixtral-8x7b", 3, "megatron", "num_experts=8 do not divide evenly by ep_size=3"),
        ("mixtral-8x7b", 2, "fsdp", "ep_size=2 with FSDP"),
    ],
    ids=["dense", "uneven", "fsdp"],
)
@pytest.mark.parametrize("many", [False, True], ids=["one layout", "many"])
def test_experts_that_cannot_be_spread_are_refused(
    preset: str, ep: int, backend: str, message: str, many: bool
) -> None:
    problem = draw(preset, 1)
    layout = ParallelSpec(dp_size=ep, ep_size=ep)
    layouts = [ParallelSpec(dp_size=ep), layout] if many else layout
    with pytest.raises(TopologyError, match=message):
        simulate_inference(problem.model, problem.cluster, layouts, WORKLOAD, backend=backend)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ParallelSpec(dp_size=4096), "4096 ranks .* do not fit a cluster of 8 devices"),
        (ParallelSpec(tp_size=3), "32 attention heads do not divide evenly by tp_size=3"),
        (ParallelSpec(pp_size=5), "32 layers do not divide evenly by pp_size=5"),
        (ParallelSpec(cp_size=2), "context parallelism is not simulated"),
    ],
)
@pytest.mark.parametrize("many", [False, True], ids=["one layout", "many"])
def test_layouts_that_no_program_could_run_are_refused(layout: ParallelSpec, message: str, many: bool) -> None:
    given = (PROBLEMS["one machine"].model, PROBLEMS["one machine"].cluster)
    layouts = [ParallelSpec(dp_size=8), layout] if many else layout
    for simulate in (simulate_training, simulate_inference, simulate_generation, estimate_memory):
        with pytest.raises(TopologyError, match=message):
            simulate(*given, layouts, WORKLOAD)  # type: ignore[operator] # each takes these


def test_a_single_stage_has_no_chunks() -> None:
    given = (PROBLEMS["one machine"].model, PROBLEMS["one machine"].cluster)
    thirds = dataclasses.replace(WORKLOAD, pipeline_chunks=3)
    for simulate in (simulate_training, simulate_inference):
        plain = simulate(*given, ParallelSpec(tp_size=8), WORKLOAD)
        assert simulate(*given, ParallelSpec(tp_size=8), thirds) == plain
        with pytest.raises(TopologyError, match="32 layers do not divide evenly by pp_size x pipeline_chunks=6"):
            simulate(*given, [ParallelSpec(tp_size=8), ParallelSpec(pp_size=2, tp_size=4)], thirds)


def test_sequences_that_do_not_divide_evenly_are_refused() -> None:
    given = (PROBLEMS["one machine"].model, PROBLEMS["one machine"].cluster, ParallelSpec(dp_size=5), WORKLOAD)
    for simulate, count in ((simulate_training, 128), (simulate_inference, 1024)):
        with pytest.raises(TopologyError, match=f"{count} sequences at a time do not divide evenly by dp_size=5"):
            simulate(*given)


@pytest.mark.parametrize(("pp", "tp", "gen_pp", "gen_tp"), [(1, 4, 1, 8), (2, 4, 4, 2), (1, 4, 1, 3)])
def test_replicas_that_cannot_be_cut_are_refused(pp: int, tp: int, gen_pp: int, gen_tp: int) -> None:
    problem = PROBLEMS["one machine"]
    spec, generation = ParallelSpec(pp_size=pp, tp_size=tp), GenerationSpec(gen_pp_size=gen_pp, gen_tp_size=gen_tp)
    message = f"{gen_pp}-{gen_tp} cannot be cut from {pp * tp} ranks with pp_size={pp} and tp_size={tp}"
    for parallel, wanted in ((spec, generation), ([ParallelSpec(tp_size=8), spec], [GenerationSpec(), generation])):
        with pytest.raises(TopologyError, match=message):
            simulate_generation(problem.model, problem.cluster, parallel, problem.workload, generation=wanted)


def test_transitions_receive_what_table_2_says() -> None:
    """Every nested layout of 1 to 8 stages and ranks, by the formula of hf_protocols."""
    model, sizes = ModelShape.preset("llama-2-13b"), (1, 2, 4, 8)
    nested = [
        (pp, tp, gen_pp, gen_tp)
        for pp, tp, gen_pp, gen_tp in itertools.product(sizes, repeat=4)
        if pp % gen_pp == 0 and tp % gen_tp == 0
    ]
    pp, tp, gen_pp, gen_tp = np.array(nested).T
    layouts = Layouts(pp_size=pp, tp_size=tp, dp_size=1, world_size=pp * tp, fsdp=False)
    found = received_weight_bytes(
        model, layouts, GenerationLayouts(gen_pp_size=gen_pp, gen_tp_size=gen_tp, num_waves=1), WORKLOAD
    )
    whole = weight_bytes(model, WORKLOAD)
    expected = [
        compute_transition_cost(
            whole,
            Topology(
                ParallelSpec(pp_size=sizes[0], tp_size=sizes[1]),
                GenerationSpec(gen_pp_size=sizes[2], gen_tp_size=sizes[3]),
            ),
        ).recv_bytes
        for sizes in nested
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-3)
