"""The search against brute force: every partition, allocation and combination of layouts, written out again here.

Shared with the search are only `pack` and the simulators. What is enumerated, what is valid, how memory adds up and
what an iteration costs is stated again, without bounds, frontiers or memoisation.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from hf_mapper import (
    ClusterSpec,
    EfficiencySpec,
    GpuSpec,
    MachineSpec,
    PoolRequest,
    WorkloadSpec,
    estimate_memory,
    map_dataflow,
    pack,
    simulate_generation,
    simulate_inference,
    simulate_training,
)
from hf_protocols import Dataflow, GenerationSpec, MappingPlan, ModelCall, ModelShape, ParallelSpec, PlanError

NUM_PROBLEMS = 400
SPLIT = 8
# A quarter in every run, the others where tests may take minutes.
PARTS = [pytest.param(part, marks=[pytest.mark.slow] if part % 4 else []) for part in range(SPLIT)]


class Way(NamedTuple):
    stage_s: tuple[float, ...]
    state: float
    work: float
    host: float = 0.0


class OracleCase(NamedTuple):
    dataflow: Dataflow
    models: Mapping[str, ModelShape]
    cluster: ClusterSpec
    workload: WorkloadSpec
    backends: tuple[str, ...]


# ------------------------------------------------------------------------------------------------------ random problems


def draw_model(chance: random.Random, name: str) -> ModelShape:
    heads = chance.choice([1, 2, 4])
    return ModelShape(
        name=name,
        num_layers=chance.choice([2, 3, 4]),
        hidden_size=chance.choice([256, 1024]),
        intermediate_size=chance.choice([512, 2048, 2049]),
        num_heads=heads,
        num_kv_heads=chance.choice([head for head in (1, 2, 4) if head <= heads]),
        head_dim=64,
        vocab_size=chance.choice([100, 5000]),
    )


def draw_machine(chance: random.Random, kind: str, num_gpus: int, num_machines: int, memory: float) -> MachineSpec:
    peak = chance.choice([1e11, 1e12, 1e13])
    spec = GpuSpec(
        kind=kind,
        memory_bytes=int(memory),
        reserved_bytes=0,
        peak_flops_per_s={"bfloat16": peak},
        memory_bandwidth_bytes_per_s=peak / chance.choice([30, 300]),
        link_bandwidth_bytes_per_s=chance.choice([1e9, 1e11]),
        source="chance",
        efficiency=EfficiencySpec(layer_latency_s=chance.choice([0.0, 1e-4])),
    )
    return MachineSpec(gpu=spec, num_gpus=num_gpus, num_machines=num_machines)


def draw_problem(seed: int) -> OracleCase:
    chance = random.Random(seed)
    dataflow = Dataflow.preset(chance.choice(["ppo", "ppo", "remax", "grpo"]))
    roles = [role for role in dataflow.roles if role != "advantage"]
    if "reward" in roles and chance.random() < 0.6:
        roles.remove("reward")
    shared = draw_model(chance, "shared")
    models = {role: shared if chance.random() < 0.5 else draw_model(chance, role) for role in roles}
    # Around what the models need on one device when all are trained: some problems fit easily, some barely, some not.
    memory = sum(18 * model.num_parameters for model in models.values()) * 10 ** chance.uniform(-1.1, 0.6)
    most = 3 if len(roles) == 4 else 4
    layouts = [(size, count) for size in range(1, most + 1) for count in range(1, most // size + 1)]
    machines = [draw_machine(chance, "north", *chance.choice(layouts), memory)]
    if chance.random() < 0.35:
        machines.append(draw_machine(chance, "south", chance.choice([1, 2]), 1, memory * chance.choice([0.5, 1, 2])))
    workload = WorkloadSpec(
        global_batch=chance.choice([4, 6, 12]),
        samples_per_prompt=chance.choice([1, 2]),
        prompt_tokens=chance.choice([8, 256]),
        response_tokens=chance.choice([8, 64]),
        mini_batches=chance.choice([1, 2]),
        recompute=chance.choice(["none", "full"]),
        micro_batch_tokens=chance.choice([16, 1024]),
        max_generation_waves=chance.choice([1, 2, 3, 4]),
    )
    if seed % 2:  # any generation layout; else those that shipped engines run, which have no pipeline stages
        workload = dataclasses.replace(workload, largest_generation=None)
    cluster = ClusterSpec(machines=tuple(machines), inter_bandwidth_bytes_per_s=chance.choice([1e8, 1e10]))
    backends = chance.choice([("fsdp",), ("megatron",), ("fsdp", "megatron"), ("fsdp", "megatron")])
    link, part = chance.choice([1e7, 1e9, 1e11]), chance.choice([0, 0, 0, 0.5, 1, 2, 4])
    dataflow = dataflow.with_models(models)
    machines = [
        dataclasses.replace(
            machine,
            gpu=dataclasses.replace(machine.gpu, host_bandwidth_bytes_per_s=link),
            host_memory_bytes=int(part * memory * machine.num_gpus),
        )
        for machine in machines
    ]
    return OracleCase(dataflow, models, dataclasses.replace(cluster, machines=tuple(machines)), workload, backends)


# ---------------------------------------------------------------------------------------------------------- brute force


def every_partition(roles: list[str]) -> list[list[list[str]]]:
    """By labelling: each role gets a label, and labellings that mean the same sets are kept once."""
    found = {}
    for labels in itertools.product(range(len(roles)), repeat=len(roles)):
        groups = [
            [role for role, label in zip(roles, labels, strict=True) if label == wanted] for wanted in set(labels)
        ]
        found[frozenset(map(frozenset, groups))] = groups
    return list(found.values())


def every_layout(
    problem: OracleCase, model: ModelShape, machine: MachineSpec, n: int, trained: bool
) -> Iterator[tuple]:
    sequences = problem.workload.num_sequences
    rows = sequences // problem.workload.mini_batches if trained else sequences
    for pp, tp, dp in itertools.product(range(1, n + 1), repeat=3):
        if pp * tp * dp != n or rows % dp or model.num_layers % pp:
            continue
        if model.num_heads % tp or model.num_kv_heads % tp or model.intermediate_size % tp:
            continue
        if not stays_inside(machine, n, tp):
            continue
        for backend in problem.backends:
            if backend == "megatron" or pp * tp == 1:
                yield ParallelSpec(pp_size=pp, tp_size=tp, dp_size=dp), backend


def stays_inside(machine: MachineSpec, n: int, tp: int) -> bool:
    """Number the ranks over whole machines and a rest, and look where each tensor group lies."""
    host = [rank // machine.num_gpus for rank in range(n)]
    return n % tp == 0 and all(len(set(host[start : start + tp])) == 1 for start in range(0, n, tp))


def every_generation(problem: OracleCase, model: ModelShape, machine: MachineSpec, spec: ParallelSpec, backend: str):
    n = spec.world_size
    most_stages = n if problem.workload.largest_generation is None else 1
    for gen_pp, gen_tp in itertools.product(range(1, most_stages + 1), range(1, n + 1)):
        nested = spec.pp_size % gen_pp == 0 and (backend == "fsdp" or spec.tp_size % gen_tp == 0)
        if not nested or n % (gen_pp * gen_tp) or problem.workload.global_batch % (n // (gen_pp * gen_tp)):
            continue
        whole_heads = model.num_kv_heads % gen_tp == 0 or gen_tp % model.num_kv_heads == 0
        if model.num_heads % gen_tp or model.intermediate_size % gen_tp or not whole_heads:
            continue
        if stays_inside(machine, n, gen_tp):
            local = problem.workload.num_sequences // (n // (gen_pp * gen_tp))
            most = min(local, problem.workload.max_generation_waves)
            for waves in sorted({1, 2, 4, 8, 16, most}):
                if waves <= most:
                    yield GenerationSpec(gen_pp_size=gen_pp, gen_tp_size=gen_tp), waves


def seconds_of(kind: str, *given: Any, backend: str) -> float:
    """Of a call that does not generate; the simulators are looked up here, so that a test may put others in place."""
    if kind == "function":
        return 0.0
    simulate = simulate_training if kind == "training" else simulate_inference
    return float(simulate(*given, backend=backend).latency_s)


def every_way(problem: OracleCase, role: str, kind: int, n: int) -> list[Way]:
    model, part = problem.models[role], problem.cluster.only(kind)
    stages = [[call.kind for call in stage if call.role == role] for stage in problem.dataflow.stages()]
    calls = {call for stage in stages for call in stage}
    found = []
    num_swaps = [sum(count_swaps(problem, call) for call in stage) for stage in stages]
    for spec, backend in every_layout(problem, model, part.machine, n, "training" in calls):
        given = (model, part, spec, problem.workload)
        seconds = {kind: seconds_of(kind, *given, backend=backend) for kind in calls - {"generation"}}
        layouts = [(None, 1)]
        if "generation" in calls:
            layouts = list(every_generation(problem, model, part.machine, spec, backend))
        for generation, waves in layouts:
            transition_s = 0.0
            if generation is not None:
                rollout = simulate_generation(*given, generation=generation, num_waves=waves, backend=backend).breakdown
                seconds["generation"] = rollout["prefill_s"] + rollout["decode_s"]
                transition_s = rollout["transition_s"]
            memory = estimate_memory(
                *given, calls=sorted(calls), generation=generation, num_waves=waves, backend=backend
            )
            state = sum(memory.breakdown[name] for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"))
            fetch = fetch_stages_s(problem, role, part, spec, generation)
            stage_s = tuple(
                sum(seconds[call] for call in stage) + (transition_s if "generation" in stage else 0.0) + fetched
                for stage, fetched in zip(stages, fetch, strict=True)
            )
            found.append(Way(stage_s, state, memory.memory_bytes - state))
            if part.machine.host_memory_bytes:
                swapped = [count * swap_s(part, state) for count in num_swaps]
                slower = tuple(map(sum, zip(stage_s, swapped, strict=True)))
                found.append(Way(slower, 0.0, memory.memory_bytes, host=state))
    return found


COLUMNS = {
    **dict.fromkeys(("row_id", "answer", "finish_reason", "weight_version", "scores", "baseline_scores"), ("row", 8)),
    **dict.fromkeys(("sample_id", "prompt_id", "group_id"), ("row", 0)),  # the mapper counts no names
    "prompt_ids": ("prompt", 8),
    "response_ids": ("response", 8),
    "response_mask": ("response", 1),
    **dict.fromkeys(
        ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns"), ("response", 4)
    ),
}


def fetch_stages_s(
    problem: OracleCase, role: str, part: ClusterSpec, spec: ParallelSpec, generation: GenerationSpec | None
) -> list[float]:
    """Seconds per stage in which the rows of the role's calls come and go."""
    return [
        sum(fetch_s(problem, call, part, spec, generation) for call in stage if call.role == role)
        for stage in problem.dataflow.stages()
    ]


def fetch_s(
    problem: OracleCase, call: ModelCall, part: ClusterSpec, spec: ParallelSpec, generation: GenerationSpec | None
) -> float:
    """Rank by rank: each reads the rows of its share, the first rank of a share sends what was written."""
    if call.kind == "function":
        return 0.0
    workload, n = problem.workload, spec.world_size
    lengths = {"row": 1, "prompt": workload.prompt_tokens, "response": workload.response_tokens}
    row_in, row_out = (
        sum(lengths[per] * size for per, size in (COLUMNS[name.removesuffix("_2")] for name in names))
        for names in (call.reads, call.writes)
    )
    rows_in = {"generation": workload.global_batch, "training": workload.num_sequences * workload.epochs}
    shares = spec.dp_size
    if call.kind == "generation":
        assert generation is not None
        shares = n / (generation.gen_pp_size * generation.gen_tp_size)
    taken = rows_in.get(call.kind, workload.num_sequences) * row_in / shares
    given = workload.num_sequences * row_out / shares
    seconds = (taken + given) / part.machine.gpu.host_bandwidth_bytes_per_s / part.link_efficiency
    if sum(machine.num_machines for machine in problem.cluster.machines) == 1:
        return seconds
    members = min(n, part.machine.num_gpus)
    sent = members * taken + members * shares / n * given
    hops = (taken > 0) + (given > 0)
    return seconds + sent / part.inter_bandwidth_bytes_per_s / part.link_efficiency + part.inter_latency_s * hops


def count_swaps(problem: OracleCase, kind: str) -> int:
    """Between updates another model of the pool may have its turn, so each is a way to the device and back."""
    return {"function": 0, "training": problem.workload.epochs * problem.workload.mini_batches}.get(kind, 1)


def swap_s(part: ClusterSpec, state: float) -> float:
    return 2 * state / part.machine.gpu.host_bandwidth_bytes_per_s / part.link_efficiency


def every_pool(problem: OracleCase, roles: list[str], kind: int, n: int) -> np.ndarray:
    """Seconds per stage `[combinations, stages]` of the roles side by side, where memory allows."""
    gpu = problem.cluster.machines[kind].gpu
    usable = gpu.memory_bytes * (1 - gpu.efficiency.fragmentation)
    spare = problem.cluster.machines[kind].host_memory_bytes / problem.cluster.machines[kind].num_gpus
    ways = [every_way(problem, role, kind, n) for role in roles]
    count = len(problem.dataflow.stages())
    # A row for each combination: seconds per stage, state, host and the largest work.
    rows = np.zeros((1, count + 3))
    for of_role in ways:
        own = np.array([(*way.stage_s, way.state, way.host, way.work) for way in of_role]).reshape(-1, count + 3)
        grown = rows[:, None, :] + own[None, :, :]
        grown[:, :, -1] = np.maximum(rows[:, None, -1], own[None, :, -1])
        rows = grown.reshape(-1, count + 3)
    fits = (rows[:, count] + rows[:, -1] <= usable) & (rows[:, count + 1] <= spare)
    return np.unique(rows[fits, :count], axis=0)


def brute_force(problem: OracleCase) -> tuple[float, int, int] | None:
    """(seconds, pools, devices) of the best placement, None where nothing fits."""
    requests = [
        PoolRequest(machine=kind, num_gpus=n)
        for kind, machine in enumerate(problem.cluster.machines)
        for n in range(1, machine.total_gpus + 1)
    ]
    tables: dict[tuple[str, ...], dict[PoolRequest, np.ndarray]] = {}
    answers = []
    for partition in every_partition(list(problem.models)):
        for roles in partition:
            if tuple(roles) not in tables:
                tables[tuple(roles)] = {r: every_pool(problem, roles, r.machine, r.num_gpus) for r in requests}
        for allocation in itertools.product(requests, repeat=len(partition)):
            if pack(problem.cluster, allocation) is None:
                continue
            slowest = np.zeros((1, len(problem.dataflow.stages())))
            for roles, request in zip(partition, allocation, strict=True):
                own = tables[tuple(roles)][request]
                slowest = np.maximum(slowest[:, None, :], own[None, :, :]).reshape(-1, slowest.shape[1])
            if len(slowest):
                devices = sum(request.num_gpus for request in allocation)
                answers.append((float(slowest.sum(axis=1).min()), len(partition), devices))
    if not answers:
        return None
    least = min(cost for cost, _, _ in answers)
    ties = [rest for cost, *rest in answers if cost <= least * (1 + 1e-10)]
    return least, *min(ties)


# ---------------------------------------------------------------------------------------------------------------- tests


def solve(problem: OracleCase) -> MappingPlan | None:
    try:
        return map_dataflow(*problem[:4], backends=problem.backends)
    except PlanError:
        return None


def describe(plan: MappingPlan, problem: OracleCase) -> tuple[float, int, int]:
    """(seconds, pools, devices), the seconds priced again from the plan's layouts."""
    placed = [pool for pool in plan.pools if set(plan.roles_of(pool.name)) & set(problem.models)]
    devices = sum(pool.num_slots for pool in placed)
    assert devices + plan.estimates.idle_gpus == problem.cluster.num_gpus
    kinds = [machine.gpu.kind for machine in problem.cluster.machines]
    stages = []
    for pool in placed:
        part = problem.cluster.only(kinds.index(pool.machines[0].gpu_kind))
        stages.append(np.sum([price(plan, problem, role, part) for role in plan.roles_of(pool.name)], axis=0))
    return float(np.max(stages, axis=0).sum()), len(placed), devices


def price(plan: MappingPlan, problem: OracleCase, role: str, part: ClusterSpec) -> list[float]:
    model, chosen = problem.models[role], plan.models[role]
    assert chosen.train is not None
    given = (model, part, chosen.train, problem.workload)
    calls = [[call.kind for call in stage if call.role == role] for stage in problem.dataflow.stages()]
    kinds = sorted({kind for stage in calls for kind in stage})
    seconds = {kind: seconds_of(kind, *given, backend=chosen.backend) for kind in {*kinds} - {"generation"}}
    transition_s = 0.0
    if chosen.generation is not None:
        waves = plan.estimates.models[role].generation_waves
        rollout = simulate_generation(*given, generation=chosen.generation, num_waves=waves, backend=chosen.backend)
        transition_s = rollout.breakdown["transition_s"]
        seconds["generation"] = rollout.latency_s - transition_s
    fetch = fetch_stages_s(problem, role, part, chosen.train, chosen.generation)
    memory = estimate_memory(*given, calls=kinds, backend=chosen.backend).breakdown
    state = memory["weight_bytes"] + memory["gradient_bytes"] + memory["optimizer_bytes"]
    once_s = swap_s(part, state) if chosen.offload else 0.0
    return [
        sum(seconds[kind] + once_s * count_swaps(problem, kind) for kind in stage)
        + transition_s * ("generation" in stage)
        + fetched
        for stage, fetched in zip(calls, fetch, strict=True)
    ]


@pytest.mark.parametrize("part", PARTS)
def test_the_search_finds_what_brute_force_finds(part: int, solved: Callable[[int], MappingPlan | None]) -> None:
    for seed in range(part, NUM_PROBLEMS, SPLIT):
        problem = draw_problem(seed)
        expected, plan = brute_force(problem), solved(seed)
        assert (plan is None) == (expected is None), seed
        if plan is None or expected is None:
            continue
        found = describe(plan, problem)
        assert found == pytest.approx(expected, rel=1e-8), seed
        assert plan.estimates.iteration_s == pytest.approx(expected[0], rel=1e-8), seed
