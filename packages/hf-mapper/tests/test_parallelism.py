from __future__ import annotations

import dataclasses

import pytest

from hf_mapper import (
    ClusterSpec,
    MachineSpec,
    PoolRequest,
    WorkloadSpec,
    gpu,
    pack,
    simulate_inference,
    simulate_training,
)
from hf_mapper.search.demand import ModelDemand
from hf_mapper.search.parallelism import (
    ModelOption,
    build_options,
    default_backends,
    find_device_counts,
    generation_layouts,
    parallel_layouts,
    wave_counts,
)
from hf_mapper.search.pools import PoolTable
from hf_protocols import ConfigError, GenerationSpec, ModelShape, ParallelSpec, Topology

LLAMA = ModelShape.preset("llama-2-7b")
WORKLOAD = WorkloadSpec(global_batch=1024, prompt_tokens=1024, response_tokens=1024, mini_batches=8)
MACHINE = MachineSpec(gpu=gpu("a100-80"), num_gpus=8, num_machines=16)
CLUSTER = ClusterSpec(machines=(MACHINE,), inter_bandwidth_bytes_per_s=25e9)
BOTH = ("fsdp", "megatron")

REFERENCE = ModelDemand(model=LLAMA, calls=(("inference",),))
ACTOR = ModelDemand(model=LLAMA, calls=(("generation",), ("inference",), ("training",)))


def fastest_alone(demand: ModelDemand, num_gpus: int, budget_gib: int) -> ModelOption | None:
    """The fastest of the search's ways to run a model alone on devices with so much memory to fill."""
    chip = dataclasses.replace(gpu("a100-80"), memory_bytes=budget_gib * 2**30, reserved_bytes=0)
    chip = dataclasses.replace(chip, efficiency=dataclasses.replace(chip.efficiency, fragmentation=0.0))
    cluster = dataclasses.replace(CLUSTER, machines=(dataclasses.replace(MACHINE, gpu=chip),))
    table = PoolTable(demands=[demand], cluster=cluster, workload=WORKLOAD)
    ways = table.options(0, PoolRequest(machine=0, num_gpus=num_gpus))
    return min(ways, key=lambda way: sum(way.stage_s), default=None)


def written(model: ModelShape, num_gpus: int, *, workload=WORKLOAD, backends=BOTH, trained=True) -> list[str]:
    layouts = parallel_layouts(model, MACHINE, num_gpus, workload, backends, trained)
    return [f"{spec.pp_size}-{spec.tp_size}-{spec.dp_size} {backend}" for spec, backend in layouts]


def test_layouts_of_eight_gpus() -> None:
    assert written(LLAMA, 8) == [
        "1-1-8 fsdp",
        "1-1-8 megatron",
        "1-2-4 megatron",
        "1-4-2 megatron",
        "1-8-1 megatron",
        "2-1-4 megatron",
        "2-2-2 megatron",
        "2-4-1 megatron",
        "4-1-2 megatron",
        "4-2-1 megatron",
        "8-1-1 megatron",
    ]


def test_experts_spread_over_every_part_of_dp_ranks() -> None:
    mixtral = ModelShape.preset("mixtral-8x7b")
    found = [
        (spec.pp_size, spec.tp_size, spec.dp_size, spec.ep_size, backend)
        for spec, backend in parallel_layouts(mixtral, MACHINE, 4, WORKLOAD, BOTH, True)
    ]
    assert found == [
        (1, 1, 4, 1, "fsdp"),
        (1, 1, 4, 1, "megatron"),
        (1, 1, 4, 2, "megatron"),
        (1, 1, 4, 4, "megatron"),
        (1, 2, 2, 1, "megatron"),
        (1, 2, 2, 2, "megatron"),
        (1, 4, 1, 1, "megatron"),
        (2, 1, 2, 1, "megatron"),
        (2, 1, 2, 2, "megatron"),
        (2, 2, 1, 1, "megatron"),
        (4, 1, 1, 1, "megatron"),
    ]


def test_spread_experts_are_chosen_where_they_are_fastest() -> None:
    """Against every layout, one by one."""
    mixtral = ModelShape.preset("mixtral-8x7b")
    demand = ModelDemand(model=mixtral, calls=(("training",),))
    times = {
        (spec, backend): simulate_training(mixtral, CLUSTER, spec, WORKLOAD, backend=backend).latency_s
        for spec, backend in parallel_layouts(mixtral, MACHINE, 32, WORKLOAD, BOTH, True)
    }
    best = fastest_alone(demand, 32, 2**20)
    assert best is not None
    assert sum(best.stage_s) == pytest.approx(min(times.values()))
    assert (best.parallel, best.backend) == min(times, key=lambda layout: times[layout])
    assert best.parallel.ep_size > 1


def test_layers_heads_and_batches_must_divide() -> None:
    assert written(LLAMA, 3) == []
    by_three = dataclasses.replace(WORKLOAD, global_batch=768)
    assert written(LLAMA, 3, workload=by_three) == ["1-1-3 fsdp", "1-1-3 megatron"]
    three_layers = dataclasses.replace(LLAMA, num_layers=3)
    assert written(three_layers, 3) == ["3-1-1 megatron"]
    grouped = dataclasses.replace(LLAMA, num_kv_heads=2)
    assert "1-4-2 megatron" not in written(grouped, 8)
    odd_width = dataclasses.replace(LLAMA, intermediate_size=11009)
    assert not any("-2-" in layout for layout in written(odd_width, 8))


def test_an_update_is_shared_and_a_forward_pass_too() -> None:
    one_prompt_updates = dataclasses.replace(WORKLOAD, mini_batches=1024)
    assert "1-1-8 fsdp" not in written(LLAMA, 8, workload=one_prompt_updates)
    assert "1-1-8 fsdp" in written(LLAMA, 8, workload=one_prompt_updates, trained=False)


def test_backends_that_are_there_decide() -> None:
    assert written(LLAMA, 2, backends=("fsdp",)) == ["1-1-2 fsdp"]
    assert written(LLAMA, 2, backends=("megatron",)) == ["1-1-2 megatron", "1-2-1 megatron", "2-1-1 megatron"]
    assert default_backends("cpu") == ("fsdp",)
    assert default_backends("h100") == BOTH
    assert default_backends("cpu", ["megatron"]) == ("megatron",)
    with pytest.raises(ConfigError, match=r"backend 'megatronn' is unknown. Did you mean megatron\?"):
        default_backends("h100", ["megatronn"])
    with pytest.raises(ConfigError, match="backends is empty"):
        default_backends("h100", [])


def test_tensor_groups_stay_inside_the_machines_that_pack_gives() -> None:
    machine = MachineSpec(gpu=gpu("a100-80"), num_gpus=6, num_machines=4)
    cluster = ClusterSpec(machines=(machine,), inter_bandwidth_bytes_per_s=25e9)
    workload = dataclasses.replace(WORKLOAD, global_batch=2520, mini_batches=1)
    model = dataclasses.replace(LLAMA, num_heads=60, num_kv_heads=60, intermediate_size=60, num_layers=1)
    seen = set()
    for num_gpus in range(1, 25):
        placed = pack(cluster, [PoolRequest(machine=0, num_gpus=num_gpus)])
        assert placed is not None
        hosts = [slots.index for slots in placed[0] for _ in range(slots.slots)]
        found = {spec.tp_size for spec, _ in parallel_layouts(model, machine, num_gpus, workload, BOTH, True)}
        for tp in (1, 2, 3, 4, 5, 6):
            if num_gpus % tp == 0:
                groups = Topology(ParallelSpec(tp_size=tp, dp_size=num_gpus // tp)).groups("tp")
                inside = all(len({hosts[rank] for rank in group}) == 1 for group in groups)
                assert (tp in found) == (inside and 2520 % (num_gpus // tp) == 0)
                seen.add((tp, inside))
    assert {(4, True), (4, False), (6, True)} <= seen


def test_generation_nests_in_megatron_and_is_free_in_fsdp() -> None:
    unbounded = dataclasses.replace(WORKLOAD, largest_generation=None)

    def sizes(layout: str, backend: str) -> list[str]:
        found = generation_layouts(LLAMA, MACHINE, ParallelSpec.parse(layout), backend, unbounded)
        return [f"{spec.gen_pp_size}-{spec.gen_tp_size}" for spec in found]

    assert sizes("2-4-1", "megatron") == ["1-1", "1-2", "1-4", "2-1", "2-2", "2-4"]
    assert sizes("1-1-8", "fsdp") == ["1-1", "1-2", "1-4", "1-8"]
    assert sizes("1-1-2", "fsdp") == ["1-1", "1-2"]


def test_generation_replicas_share_the_prompts() -> None:
    workload = dataclasses.replace(WORKLOAD, global_batch=2, mini_batches=1)
    found = generation_layouts(LLAMA, MACHINE, ParallelSpec.parse("1-8-1"), "megatron", workload)
    assert [spec.gen_tp_size for spec in found] == [4, 8]


def test_waves_are_powers_of_two_and_the_limit() -> None:
    assert wave_counts(WORKLOAD, 8) == (1, 2, 4, 8, 16)
    assert wave_counts(WORKLOAD, 256) == (1, 2, 4)
    assert wave_counts(dataclasses.replace(WORKLOAD, max_generation_waves=1), 8) == (1,)
    assert wave_counts(dataclasses.replace(WORKLOAD, max_generation_waves=3), 8) == (1, 2, 3)
    assert wave_counts(dataclasses.replace(WORKLOAD, global_batch=96), 8) == (1, 2, 4, 8, 12)


def test_interleaved_stages_have_whole_layers() -> None:
    def pipelines(chunks: int) -> set[int]:
        workload = dataclasses.replace(WORKLOAD, pipeline_chunks=chunks)
        return {found.pp_size for found, _ in parallel_layouts(LLAMA, MACHINE, 64, workload, ("megatron",), True)}

    assert (LLAMA.num_layers, pipelines(1)) == (32, {1, 2, 4, 8, 16, 32})
    assert pipelines(2) == {1, 2, 4, 8, 16} and pipelines(3) == {1}


def test_device_counts_are_those_with_layouts() -> None:
    workload = dataclasses.replace(WORKLOAD, global_batch=360, mini_batches=3)
    for demand in (REFERENCE, ACTOR):
        with_layouts = {
            count
            for count in range(1, 129)
            if any(parallel_layouts(LLAMA, MACHINE, count, workload, BOTH, demand.trained))
        }
        assert with_layouts <= find_device_counts(demand, MACHINE, workload) <= set(range(1, 129))


@pytest.mark.parametrize("budget_gib", [4, 8, 20, 40, 80])
def test_the_best_layout_is_the_fastest_that_fits(budget_gib: int) -> None:
    best = fastest_alone(REFERENCE, 8, budget_gib)
    fitting = []
    for spec, backend in parallel_layouts(LLAMA, MACHINE, 8, WORKLOAD, BOTH, False):
        found = simulate_inference(LLAMA, CLUSTER, spec, WORKLOAD, backend=backend)
        cut = 8 if backend == "fsdp" else spec.pp_size * spec.tp_size
        if found.memory_bytes + 2 * LLAMA.num_parameters / cut <= budget_gib * 2**30:
            fitting.append(found.latency_s)
    assert best is not None
    assert best.memory_bytes <= budget_gib * 2**30
    assert sum(best.stage_s) == pytest.approx(min(fitting))


def test_a_budget_that_is_too_small_has_no_layout() -> None:
    assert fastest_alone(ACTOR, 8, 1) is None


def test_less_memory_makes_generation_go_in_waves() -> None:
    plenty, little = (fastest_alone(ACTOR, 8, gib) for gib in (512, 30))
    assert plenty is not None
    assert little is not None
    assert plenty.num_waves == 1
    assert little.num_waves > 1
    assert sum(little.stage_s) > sum(plenty.stage_s)


def test_two_generations_in_a_stage_share_one_transition() -> None:
    once = ModelDemand(model=LLAMA, calls=(("generation",),))
    twice = ModelDemand(model=LLAMA, calls=(("generation", "generation"),))
    for one, two in zip(*(build_options(demand, CLUSTER, 4, WORKLOAD, BOTH) for demand in (once, twice)), strict=True):
        assert one.stage_s[0] < two.stage_s[0] <= 2 * one.stage_s[0]
        assert (two.parallel, two.generation, two.work_bytes) == (one.parallel, one.generation, one.work_bytes)


def test_engine_bounds_the_generation_layouts():
    machine = MachineSpec(gpu=gpu("a100-80"), num_gpus=8)
    model = ModelShape.preset("llama-2-7b")
    free = WorkloadSpec(global_batch=64, prompt_tokens=8, response_tokens=8, largest_generation=None)
    for layout in (ParallelSpec(dp_size=8), ParallelSpec(pp_size=2, tp_size=4)):
        backend = "fsdp" if layout.dp_size == 8 else "megatron"
        every = set(generation_layouts(model, machine, layout, backend, free))
        assert len(every) > 1
        for largest in (GenerationSpec(), GenerationSpec(gen_tp_size=2), GenerationSpec(gen_pp_size=2, gen_tp_size=1)):
            bounded = dataclasses.replace(free, largest_generation=largest)
            assert set(generation_layouts(model, machine, layout, backend, bounded)) == {
                spec
                for spec in every
                if spec.gen_pp_size <= largest.gen_pp_size and spec.gen_tp_size <= largest.gen_tp_size
            }


def test_generation_has_no_pipeline_stages_unless_asked():
    """No engine of hf-engine runs any; 80 layers on 8 devices might be sharded over 2, 4 or 8 of them."""
    machine, model = MachineSpec(gpu=gpu("a100-80"), num_gpus=8), ModelShape.preset("llama-2-70b")
    layout, shipped = (
        ParallelSpec(pp_size=4, tp_size=2),
        WorkloadSpec(global_batch=64, prompt_tokens=8, response_tokens=8),
    )

    def sizes(workload: WorkloadSpec) -> set[tuple[int, int]]:
        found = generation_layouts(model, machine, layout, "megatron", workload)
        return {(spec.gen_pp_size, spec.gen_tp_size) for spec in found}

    assert sizes(shipped) == {(1, 1), (1, 2)}
    more = dataclasses.replace(shipped, largest_generation=GenerationSpec(gen_pp_size=2, gen_tp_size=64))
    assert sizes(more) == {(1, 1), (1, 2), (2, 1), (2, 2)}
