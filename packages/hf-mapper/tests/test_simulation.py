from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hf_mapper import (
    ClusterSpec,
    MachineSpec,
    PoolChoice,
    PoolRequest,
    WorkloadSpec,
    gpu,
    map_dataflow,
    parse_placement,
    read_placement,
    simulate_generation,
    simulate_inference,
    simulate_placement,
    simulate_training,
)
from hf_mapper.cli import main
from hf_mapper.search.demand import build_demands
from hf_mapper.search.placements import set_partitions
from hf_mapper.search.pools import PoolTable
from hf_protocols import (
    ConfigError,
    Dataflow,
    GenerationSpec,
    HybridFlowError,
    MachinePlan,
    MappingPlan,
    ModelShape,
    ParallelSpec,
    PlanError,
)

SMALL = ModelShape.preset("qwen2.5-0.5b")
LARGE = ModelShape.preset("llama-2-7b")
PPO = Dataflow.preset("ppo")
WORKLOAD = WorkloadSpec(global_batch=64, prompt_tokens=256, response_tokens=256, mini_batches=4)


def cluster(kind: str, num_gpus: int) -> ClusterSpec:
    return ClusterSpec(machines=(MachineSpec(gpu=gpu(kind), num_gpus=num_gpus),))


def models(shape: ModelShape, *roles: str) -> dict[str, ModelShape]:
    return dict.fromkeys(roles or ("actor", "critic", "reference"), shape)


@pytest.mark.parametrize(("preset", "shape"), [("ppo", SMALL), ("grpo", LARGE), ("remax", SMALL)])
def test_the_plan_that_was_found_simulates_to_its_own_estimates(preset: str, shape: ModelShape) -> None:
    flow, machines = Dataflow.preset(preset), cluster("a100-80", 8)
    shapes = {role: shape for role in flow.roles if role not in ("reward", "advantage")}
    plan = map_dataflow(flow, shapes, machines, WORKLOAD)
    found = simulate_placement(flow, shapes, machines, WORKLOAD, read_placement(plan))
    assert found.plan.models == plan.models
    assert found.plan.pools == plan.pools
    assert found.iteration_s == pytest.approx(plan.estimates.iteration_s, rel=1e-12)
    for stage, wanted in zip(found.plan.estimates.stages, plan.estimates.stages, strict=True):
        assert stage == replace(wanted, latency_s=pytest.approx(wanted.latency_s, rel=1e-12))
    # the calls of a pool add up to its time in each stage
    for name, pool in plan.estimates.pools.items():
        for number, seconds in enumerate(pool.stage_s):
            parts = [call.latency_s for call in found.calls if (call.pool, call.stage) == (name, number)]
            assert sum(parts) == pytest.approx(seconds)
        largest = max(call.memory_bytes for call in found.calls if call.pool == name)
        assert largest == pytest.approx(pool.memory_bytes)
    assert not found.overfull


def test_search_finds_the_best_of_all_placements() -> None:
    """Every partition on every allocation of four devices, each simulated: none is faster than the plan."""
    machines, shapes = cluster("l40s", 4), models(SMALL)
    found = []
    for partition in set_partitions(tuple(shapes)):
        for counts in itertools.product(range(1, 5), repeat=len(partition)):
            if sum(counts) > 4:
                continue
            pools = [PoolChoice(roles=roles, num_gpus=n) for roles, n in zip(partition, counts, strict=True)]
            try:
                simulated = simulate_placement(PPO, shapes, machines, WORKLOAD, pools)
            except PlanError:
                continue  # three devices share no batch of 64
            if not simulated.overfull:
                found.append(simulated.iteration_s)
    plan = map_dataflow(PPO, shapes, machines, WORKLOAD)
    assert min(found) == pytest.approx(plan.estimates.iteration_s, rel=1e-9)
    assert max(found) > 1.05 * min(found), "placements differ"


def test_a_model_alone_has_its_best_layout() -> None:
    machines, shapes = cluster("a100-80", 4), models(LARGE, "actor", "reference")
    flow = Dataflow.preset("grpo")
    pools = parse_placement("actor=2, reference=2")
    found = simulate_placement(flow, shapes, machines, WORKLOAD, pools)
    demand = build_demands(flow, shapes, WORKLOAD)["reference"]
    table = PoolTable(demands=[demand], cluster=machines, workload=WORKLOAD)
    alone = table.options(0, PoolRequest(machine=0, num_gpus=2))
    (inference,) = (call for call in found.calls if call.role == "reference")
    assert inference.latency_s == pytest.approx(min(sum(way.stage_s) for way in alone))


def test_every_call_is_what_its_simulator_says() -> None:
    machines, shapes = cluster("a100-80", 8), models(LARGE)
    found = simulate_placement(PPO, shapes, machines, WORKLOAD, parse_placement("actor+reference=4,critic=4"))
    for call in found.calls:
        plan = found.plan.models[call.role]
        assert plan.train is not None
        if call.kind == "generation":
            waves = found.plan.estimates.models[call.role].generation_waves
            estimate = simulate_generation(
                LARGE, machines, plan.train, WORKLOAD,
                generation=plan.generation or GenerationSpec(), num_waves=waves, backend=plan.backend,
            )  # fmt: skip
        else:
            simulate = simulate_training if call.kind == "training" else simulate_inference
            estimate = simulate(LARGE, machines, plan.train, WORKLOAD, backend=plan.backend)
        moved = {name: call.breakdown[name] for name in ("transfer_s", "offload_s")}
        assert call.breakdown == {**estimate.breakdown, **moved}
        assert call.latency_s == pytest.approx(estimate.latency_s + sum(moved.values()))
        assert moved["transfer_s"] > 0 == moved["offload_s"]
    assert {call.kind for call in found.calls} == {"generation", "inference", "training"}


def test_too_little_memory_is_reported_by_call() -> None:
    machines, shapes = cluster("rtx-4090", 4), models(LARGE)
    found = simulate_placement(PPO, shapes, machines, WORKLOAD, parse_placement("actor+critic+reference=4"))
    worst = found.overfull[0]
    assert worst.excess_bytes == worst.memory_bytes - worst.usable_bytes
    with pytest.raises(
        PlanError, match=rf"{worst.role}\.{worst.method} on pool .* by {worst.excess_bytes / 2**30:.1f} GiB"
    ):
        found.check_memory()
    # so much more memory in each device is just enough
    spec = machines.machine.gpu
    more = int(worst.excess_bytes / (1 - spec.efficiency.fragmentation)) + 2**20
    larger = replace(machines.machine, gpu=replace(spec, memory_bytes=spec.memory_bytes + more))
    again = simulate_placement(PPO, shapes, ClusterSpec(machines=(larger,)), WORKLOAD, read_placement(found.plan))
    assert not again.overfull


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor+critic=4", "reference missing"),
        ("actor+critic+reference=4,critic=1", "critic is placed 2 times"),
        ("actor+critic+judge=4", "role 'judge' is unknown"),
        ("actor+critic+reference=9", "pools of 9 devices do not fit the cluster of 8"),
        ("actor=2,critic=5,reference=1", "critic: no layout can run qwen2.5-0.5b on 5 devices"),
        ("actor+critic+reference=8@h100", "kind of device 'h100' is unknown"),
        ("actor+critic+reference", "Write each pool as its roles and its number of devices"),
        ("actor+critic+reference=0", "Write each pool as"),
        ("actor+critic+reference=8@", "Write each pool as"),
        ("", "Write each pool as"),
    ],
)
def test_bad_placements(text: str, message: str) -> None:
    with pytest.raises((PlanError, ConfigError), match=message.replace("+", r"\+")):
        simulate_placement(PPO, models(SMALL), cluster("l40s", 8), WORKLOAD, parse_placement(text))


@pytest.mark.parametrize(
    ("role", "change", "message"),
    [
        ("actor", {"backend": "megatrn"}, "actor: backend 'megatrn' is unknown. Did you mean megatron"),
        ("actor", {"generation": None}, "actor: generation missing of a model that generates"),
        ("critic", {"generation": GenerationSpec()}, "critic: generation 1-1 of a model that does not generate"),
        ("critic", {"offload": True}, "critic: offload on machines without host_memory_bytes"),
        (
            "critic",
            {"backend": "fsdp", "train": ParallelSpec(tp_size=2, dp_size=4)},
            "critic: layout 1-2-4 with fsdp, which shards over dp_size alone",
        ),
    ],
)
def test_an_edited_plan_is_refused_for_its_own_reason(role: str, change: dict[str, object], message: str) -> None:
    machines, shapes = cluster("a100-80", 8), models(SMALL)
    plan = map_dataflow(PPO, shapes, machines, WORKLOAD)
    edited = replace(plan, models={**plan.models, role: replace(plan.models[role], **change)})
    with pytest.raises(HybridFlowError, match=message):
        simulate_placement(PPO, shapes, machines, WORKLOAD, read_placement(edited))


def test_a_pool_of_two_kinds_of_cluster_names_its_kind() -> None:
    machines = tuple(MachineSpec(gpu=gpu(kind), num_gpus=4) for kind in ("a100-80", "h100"))
    both = ClusterSpec(machines=machines, inter_bandwidth_bytes_per_s=25e9)
    with pytest.raises(PlanError, match=r"names no kind of device. Add @a100-80 or @h100"):
        simulate_placement(PPO, models(SMALL), both, WORKLOAD, parse_placement("actor+critic+reference=4"))
    pools = parse_placement("actor+critic=4@h100, reference=4@a100-80")
    found = simulate_placement(PPO, models(SMALL), both, WORKLOAD, pools)
    assert [pool.machines[0].gpu_kind for pool in found.plan.pools[:2]] == ["h100", "a100-80"]


def twice_a100() -> ClusterSpec:
    """Two entries of one kind of GPU, the second one better connected and larger."""
    slow = MachineSpec(gpu=gpu("a100-80"), num_gpus=2, intra_bandwidth_bytes_per_s=1e9)
    fast = MachineSpec(gpu=gpu("a100-80"), num_gpus=8)
    return ClusterSpec(machines=(slow, fast), inter_bandwidth_bytes_per_s=25e9)


def test_plan_over_two_entries_simulates_to_its_estimates() -> None:
    both, shapes = twice_a100(), models(LARGE)
    plan = map_dataflow(PPO, shapes, both, WORKLOAD)
    assert plan.pools[0].machines[0].slots == 8, "the better machine is the second entry"
    found = simulate_placement(PPO, shapes, both, WORKLOAD, read_placement(MappingPlan.from_json(plan.to_json())))
    assert found.plan.pools == plan.pools
    for stage, wanted in zip(found.plan.estimates.stages, plan.estimates.stages, strict=True):
        assert stage == replace(wanted, latency_s=pytest.approx(wanted.latency_s, rel=1e-12))
    pools = found.plan.estimates.pools
    for name, wanted in plan.estimates.pools.items():
        assert pools[name] == replace(wanted, stage_s=pytest.approx(wanted.stage_s, rel=1e-12))
    assert pools.keys() == plan.estimates.pools.keys()


def test_entries_of_one_kind_are_numbered() -> None:
    both, shapes = twice_a100(), models(SMALL)
    assert both.names == ("a100-80#1", "a100-80#2")
    seconds = []
    for number in (1, 2):
        pools = parse_placement(f"actor+critic+reference=2@a100-80#{number}")
        found = simulate_placement(PPO, shapes, both, WORKLOAD, pools)
        pools = parse_placement("actor+critic+reference=2")
        expected = simulate_placement(PPO, shapes, both.only(number - 1), WORKLOAD, pools)
        assert found.iteration_s == pytest.approx(expected.iteration_s, rel=1e-3), "except for rows between machines"
        seconds.append(found.iteration_s)
    assert seconds[0] > 1.02 * seconds[1], "the slow links cost something"


def test_a_plan_that_does_not_say_which_entry_is_asked() -> None:
    both, shapes = twice_a100(), models(SMALL)
    for pools in (parse_placement("actor+critic+reference=2"), parse_placement("actor+critic+reference=2@a100-80")):
        with pytest.raises(PlanError, match="Add @a100-80#1 or @a100-80#2"):
            simulate_placement(PPO, shapes, both, WORKLOAD, pools)
    plan = map_dataflow(PPO, shapes, both, WORKLOAD)
    written = replace(plan, estimates=None)  # by hand, without what the mapper leaves
    with pytest.raises(PlanError, match="Add @a100-80#1 or @a100-80#2"):
        simulate_placement(PPO, shapes, both, WORKLOAD, read_placement(written))


@pytest.mark.parametrize("slots", [(32,), (4, 4, 4, 4, 4, 4, 4, 4), (8, 8, 9, 7)])
def test_machines_that_no_pool_has_are_refused(slots: tuple[int, ...]) -> None:
    shapes = models(LARGE)
    machine = MachineSpec(gpu=gpu("h100"), num_gpus=8, num_machines=4)
    machines = ClusterSpec(machines=(machine,), inter_bandwidth_bytes_per_s=25e9)
    together = [PoolChoice(roles=tuple(shapes), num_gpus=32)]
    plan = simulate_placement(PPO, shapes, machines, WORKLOAD, together).plan
    pool = plan.pools[0]
    other = replace(pool, machines=tuple(MachinePlan(gpu_kind="h100", slots=count) for count in slots))
    edited = replace(plan, pools=tuple(other if each is pool else each for each in plan.pools))
    with pytest.raises(PlanError, match=r"whole machines of 8 and one with the rest, \[8, 8, 8, 8\]$"):
        simulate_placement(PPO, shapes, machines, WORKLOAD, read_placement(edited))


def test_simulation_prefers_edited_machines_to_estimates() -> None:
    machines = tuple(MachineSpec(gpu=gpu(kind), num_gpus=4) for kind in ("a100-80", "h100"))
    both = ClusterSpec(machines=machines, inter_bandwidth_bytes_per_s=25e9)
    pools = parse_placement("actor+critic+reference=4@h100")
    plan = simulate_placement(PPO, models(SMALL), both, WORKLOAD, pools).plan
    edited = MappingPlan.from_json(plan.to_json().replace('"gpu_kind": "h100"', '"gpu_kind": "a100-80"'))
    found = simulate_placement(PPO, models(SMALL), both, WORKLOAD, read_placement(edited))
    assert found.iteration_s > plan.estimates.iteration_s


PROBLEM = """
dataflow = "ppo"
[models]
actor = "{model}"
critic = "{model}"
reference = "{model}"
[cluster]
[[cluster.machines]]
gpu = "l40s"
num_gpus = 4
[workload]
global_batch = 64
prompt_tokens = 256
response_tokens = 256
mini_batches = 4
"""


def command(folder: Path, placement: str, *options: str, model: str = "qwen2.5-0.5b") -> tuple[int, str]:
    (folder / "problem.toml").write_text(PROBLEM.format(model=model))
    arguments = ["simulate", str(folder / "problem.toml"), "--placement", placement, *options]
    result = CliRunner().invoke(main, arguments, env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_command_prints_calls_and_json(tmp_path: Path) -> None:
    code, output = command(tmp_path, "actor=2,critic+reference=2")
    assert code == 0
    for word in ("actor.update_actor", "critic+reference", "compute", "iteration"):
        assert word in output
    code, output = command(tmp_path, "actor=2,critic+reference=2", "--json")
    assert code == 0
    body = json.loads(output)
    plan = MappingPlan.from_json(json.dumps(body["plan"]))
    assert plan.pool("actor").num_slots == 2
    assert body["calls"][0]["method"] == "generate_sequences"
    assert {"latency_s", "memory_bytes", "breakdown", "excess_bytes"} <= body["calls"][0].keys()
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    code, again = command(tmp_path, str(file), "--json")
    assert code == 0
    assert json.loads(again)["plan"]["estimates"]["iteration_s"] == body["plan"]["estimates"]["iteration_s"]


def test_commands_accept_two_machine_entries_of_one_kind(tmp_path: Path) -> None:
    entry = '[[cluster.machines]]\ngpu = "l40s"\nnum_gpus = {}\n'
    problem = PROBLEM.format(model="qwen2.5-0.5b").replace("[workload]", entry.format(8) + "[workload]")
    problem = problem.replace("[cluster]", "[cluster]\ninter_bandwidth_bytes_per_s = 25e9")
    (tmp_path / "both.toml").write_text(problem)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(main, [*arguments], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    found = json.loads(run("explain", str(tmp_path / "both.toml"), "--quick", "--json"))
    assert [more["gpu_kind"] for more in found["extensions"]] == ["l40s#1", "l40s#2"]
    (tmp_path / "plan.json").write_text(json.dumps(found["plan"]))
    again = json.loads(
        run("simulate", str(tmp_path / "both.toml"), "--placement", str(tmp_path / "plan.json"), "--json")
    )
    assert again["plan"]["estimates"]["stages"] == found["plan"]["estimates"]["stages"]
    assert "8 x l40s#2" in run("explain", str(tmp_path / "both.toml"), "--quick")


@pytest.mark.parametrize(
    ("placement", "model", "message"),
    [
        ("actor+critic+reference=4", "llama-2-7b", "out of memory by"),
        ("actor=4", "qwen2.5-0.5b", "critic, reference missing"),
        ("absent.json", "qwen2.5-0.5b", "absent.json cannot be read"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(tmp_path: Path, placement: str, model: str, message: str) -> None:
    code, output = command(tmp_path, placement, model=model)
    assert code == 2
    assert output.startswith("Error: ")
    assert message in output
    assert len(output.splitlines()) == 1
