from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_mapper import ClusterSpec, MachineSpec, WorkloadSpec, compute_cost, gpu, map_dataflow
from hf_protocols import (
    ConfigError,
    Dataflow,
    GenerationSpec,
    MappingPlan,
    ModelCall,
    ModelShape,
    ParallelSpec,
    PlanError,
)

GOLDEN = Path(__file__).parent / "golden"
QUICKSTART = WorkloadSpec(
    global_batch=128, prompt_tokens=8, response_tokens=5, mini_batches=2, dtype="float32", recompute="none"
)


@pytest.fixture
def quickstart(tiny: ModelShape) -> MappingPlan:
    models = dict.fromkeys(("actor", "critic", "reference"), tiny)
    return map_dataflow(Dataflow.preset("ppo"), models, ClusterSpec.host(2, 2 * 2**30), QUICKSTART)


def test_the_quickstart_shares_one_pool_of_two_slots(quickstart: MappingPlan) -> None:
    assert [(pool.name, pool.num_slots) for pool in quickstart.pools] == [
        ("actor+critic+reference", 2),
        ("reward+advantage", 1),
    ]
    assert {machine.gpu_kind for pool in quickstart.pools for machine in pool.machines} == {"cpu"}
    for role in ("actor", "critic", "reference"):
        assert quickstart.models[role].train == ParallelSpec(dp_size=2)
        assert quickstart.models[role].backend == "fsdp"
    assert quickstart.models["actor"].generation == GenerationSpec()
    assert quickstart.models["reward"].train is None
    assert quickstart.models["advantage"].pool == "reward+advantage"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [2, 4, 8])
@pytest.mark.parametrize("tokens", [(8, 5), (200, 120)])
def test_small_host_runs_share_one_pool(tiny: ModelShape, dtype: str, layers: int, tokens: tuple[int, int]) -> None:
    shape = dataclasses.replace(tiny, num_layers=layers, vocab_size=2048, max_positions=512)
    workload = dataclasses.replace(QUICKSTART, dtype=dtype, prompt_tokens=tokens[0], response_tokens=tokens[1])
    models = dict.fromkeys(("actor", "critic", "reference"), shape)
    plan = map_dataflow(Dataflow.preset("ppo"), models, ClusterSpec.host(2, 2 * 2**30), workload)
    assert plan.roles_of("actor+critic+reference") == ("actor", "critic", "reference")
    assert plan.models["actor"].generation == GenerationSpec()


def test_chunks_that_split_a_layer_leave_single_stages(paper_problem: Callable[..., Any]) -> None:
    problem = paper_problem("ppo", "llama-2-13b", 32)
    assert problem.models["actor"].num_layers % 3
    plan = map_dataflow(*problem[:3], dataclasses.replace(problem.workload, pipeline_chunks=3))
    assert {model.train.pp_size for model in plan.models.values() if model.train} == {1}


def assert_close(found: Any, expected: Any, where: str = "plan") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_close(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9), where
    else:
        assert found == expected, where


def test_plans_are_the_golden_ones(quickstart: MappingPlan, paper_problem: Callable[..., Any]) -> None:
    """After an intended change of the cost model, write `plan.to_json()` over the files and read the difference."""
    plans = {"quickstart": quickstart, "ppo_13b_16_a100": map_dataflow(*paper_problem("ppo", "llama-2-13b", 16))}
    for name, plan in plans.items():
        text = plan.to_json()
        assert_close(json.loads(text), json.loads((GOLDEN / f"{name}.json").read_text()), name)
        assert MappingPlan.from_json(text) == plan


def test_equal_inputs_give_equal_plans(paper_problem: Callable[..., Any]) -> None:
    problem = paper_problem("safe_rlhf_one_critic", "llama-2-7b", 64)
    assert map_dataflow(*problem).to_json() == map_dataflow(*problem).to_json()


def test_128_gpus_one_by_one_are_searched_to_the_end(paper_problem: Callable[..., Any]) -> None:
    plan = map_dataflow(*paper_problem("ppo", "llama-2-7b", 128))
    assert plan.estimates.search.complete


@pytest.mark.parametrize(("model", "count"), [("llama-2-7b", 128), ("llama-2-13b", 192)])
def test_large_clusters_split_the_models_and_small_ones_do_not(
    paper_problem: Callable[..., Any], model: str, count: int
) -> None:
    """The paper's Figure 12: colocating wins on few GPUs, and on many of them models run side by side.

    The paper splits 13B on 128 GPUs already; there the calibrated simulators see 0.3 % between the two.
    """
    few = map_dataflow(*paper_problem("ppo", model, 16))
    many = map_dataflow(*paper_problem("ppo", model, count))
    assert len({few.models[role].pool for role in ("actor", "critic", "reference", "reward")}) == 1
    assert many.models["actor"].pool != many.models["critic"].pool


def test_more_machines_are_never_slower(paper_problem: Callable[..., Any]) -> None:
    times = [
        map_dataflow(*paper_problem("remax", "llama-2-13b", count)).estimates.iteration_s
        for count in (8, 16, 24, 32, 40, 48, 64)
    ]
    assert times == sorted(times, reverse=True)


def test_the_faster_kind_takes_the_longer_work(tiny: ModelShape) -> None:
    kinds = (MachineSpec(gpu=gpu("a100-80"), num_gpus=8), MachineSpec(gpu=gpu("h100"), num_gpus=8))
    cluster = ClusterSpec(machines=kinds, inter_bandwidth_bytes_per_s=25e9)
    workload = WorkloadSpec(global_batch=256, prompt_tokens=512, response_tokens=512, mini_batches=4)
    shape = ModelShape.preset("llama-3-8b")
    plan = map_dataflow(Dataflow.preset("grpo"), dict.fromkeys(("actor", "reference"), shape), cluster, workload)
    pool = plan.pool(plan.models["actor"].pool)
    assert {machine.gpu_kind for machine in pool.machines} == {"h100"}


def test_a_stop_sign_returns_the_best_so_far(paper_problem: Callable[..., Any]) -> None:
    problem = paper_problem("safe_rlhf_one_critic", "llama-2-7b", 128)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return True

    full, stopped = map_dataflow(*problem), map_dataflow(*problem, stop)
    assert asked == 1
    assert full.estimates.search.complete
    assert not stopped.estimates.search.complete
    assert 0 < stopped.estimates.search.gap < 1
    assert stopped.estimates.iteration_s >= full.estimates.iteration_s


def test_a_stop_sign_that_never_comes_changes_nothing(paper_problem: Callable[..., Any]) -> None:
    problem = paper_problem("ppo", "llama-2-7b", 32)
    assert map_dataflow(*problem, lambda: False) == map_dataflow(*problem)


def test_infeasible_problem_names_the_smallest_cluster(paper_problem: Callable[..., Any]) -> None:
    with pytest.raises(PlanError) as raised:
        map_dataflow(*paper_problem("ppo", "llama-2-13b", 8))
    assert "no placement of actor llama-2-13b, critic llama-2-13b" in str(raised.value)
    assert "1 machine of 8 x a100-80 (80 GiB each)" in str(raised.value)
    assert "smallest cluster that would do is 2 machines of 8 x a100-80" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_ties_go_to_fewer_pools_and_fewer_devices(tiny: ModelShape) -> None:
    """A model without any work costs nothing anywhere: it joins the other one, and no idle device is taken."""
    calls = (
        ModelCall(role="worker", method="score", kind="inference", reads=("prompt_ids",), writes=("scores",)),
        ModelCall(role="idler", method="note", kind="function", reads=("scores",)),
    )
    dataflow = Dataflow(name="own", calls=calls)
    workload = WorkloadSpec(global_batch=1, prompt_tokens=8, response_tokens=8)
    models = {"worker": tiny, "idler": tiny}
    plan = map_dataflow(dataflow, models, ClusterSpec.host(4, 2**30), workload)
    assert [(pool.name, pool.num_slots) for pool in plan.pools] == [("worker+idler", 1)]
    assert plan.estimates.idle_gpus == 3


def test_the_cost_is_the_sum_over_stages_of_the_slowest_pool() -> None:
    assert compute_cost([(1.0, 5.0, 0.0), (2.0, 3.0, 0.0)]) == 7.0


def test_estimates_add_up(paper_problem: Callable[..., Any]) -> None:
    problem = paper_problem("ppo", "llama-2-70b", 128)
    plan = map_dataflow(*problem)
    estimates = plan.estimates
    for name, pool in estimates.pools.items():
        models = [estimates.models[role] for role in plan.roles_of(name)]
        assert pool.stage_s == pytest.approx([sum(times) for times in zip(*(m.stage_s for m in models), strict=True)])
        needed = sum(model.state_bytes for model in models) + max(model.work_bytes for model in models)
        assert pool.memory_bytes == pytest.approx(needed)
        assert pool.memory_bytes <= pool.usable_bytes < problem.cluster.machine.gpu.memory_bytes
    by_pool = [pool.stage_s for pool in estimates.pools.values()]
    slowest = [max(times) for times in zip(*by_pool, strict=True)]
    assert [stage.latency_s for stage in estimates.stages] == slowest
    assert estimates.iteration_s == pytest.approx(sum(slowest))
    used = sum(pool.num_slots for pool in plan.pools if pool.name in estimates.pools)
    assert used + estimates.idle_gpus == 128


def test_ragged_lengths_are_planned_and_take_less_time(paper_problem: Callable[..., Any]) -> None:
    problem = paper_problem("grpo", "llama-2-7b", 8)
    ragged = dataclasses.replace(problem.workload, response_lengths=(128, 256, 512, 1024))
    short, full = (
        map_dataflow(*problem._replace(workload=workload)).estimates for workload in (ragged, problem.workload)
    )
    assert short.iteration_s < full.iteration_s


def test_backends_by_role_are_those_of_the_plan(tiny: ModelShape) -> None:
    models = dict.fromkeys(("actor", "critic", "reference"), tiny)
    problem = (Dataflow.preset("ppo"), models, ClusterSpec.host(2, 2 * 2**30), QUICKSTART)
    plan = map_dataflow(*problem, backends={"critic": ("megatron",)})
    assert [plan.models[role].backend for role in models] == ["fsdp", "megatron", "fsdp"]
    of_all = map_dataflow(*problem, backends=("fsdp",))
    assert map_dataflow(*problem, backends=dict.fromkeys(models, ("fsdp",))) == of_all


@pytest.mark.parametrize(
    ("backends", "message"),
    [
        ({"judge": ("fsdp",)}, "backends: role 'judge' is unknown"),
        ({"actor": ("megatronn",)}, "backend 'megatronn' is unknown"),
        ({"actor": ()}, "backends is empty"),
    ],
)
def test_backends_of_roles_that_cannot_be_are_refused(
    tiny: ModelShape, backends: dict[str, tuple[str, ...]], message: str
) -> None:
    models = dict.fromkeys(("actor", "critic", "reference"), tiny)
    with pytest.raises(ConfigError, match=message):
        map_dataflow(Dataflow.preset("ppo"), models, ClusterSpec.host(2, 2 * 2**30), QUICKSTART, backends=backends)
