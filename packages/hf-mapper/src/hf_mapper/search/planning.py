"""From the search's answer to the plan: names of pools, machines, and the estimates that the choice rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_mapper.adapters import count_adapter_parameters
from hf_mapper.search.parallelism import ModelOption
from hf_mapper.search.placements import Slots
from hf_mapper.search.pools import PoolOption
from hf_mapper.specs import HOST_KIND, ClusterSpec, WorkloadSpec
from hf_protocols import (
    AdapterEstimate,
    Dataflow,
    MachinePlan,
    MappingPlan,
    ModelEstimate,
    ModelPlan,
    ModelShape,
    PlanEstimates,
    PoolEstimate,
    PoolPlan,
    SearchEstimate,
    StageEstimate,
)

__all__ = ["FUNCTION_BACKEND", "PoolPlacement", "build_plan", "estimate_adapters", "find_machines"]

FUNCTION_BACKEND = "function"


@dataclass(frozen=True, kw_only=True)
class PoolPlacement:
    """Roles that share a pool, how each runs (`option.members`, in the order of `roles`), and where."""

    roles: tuple[str, ...]
    option: PoolOption
    slots: tuple[Slots, ...]


def build_plan(
    dataflow: Dataflow,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    *,
    pools: Sequence[PoolPlacement],
    functions: Sequence[Sequence[str]],
    search: SearchEstimate,
    adapters: AdapterEstimate | None = None,
) -> MappingPlan:
    """The plan of `pools` and of one host slot for each group of `functions`; roles in the dataflow's order.

    A pool is named after its roles, joined by `+`.
    """
    order = {role: number for number, role in enumerate(dataflow.roles)}
    named = {"+".join(sorted(pool.roles, key=order.__getitem__)): pool for pool in pools}
    named = dict(sorted(named.items(), key=lambda item: min(order[role] for role in item[1].roles)))
    chosen: dict[str, tuple[str, ModelOption]] = {}
    for name, pool in named.items():
        chosen.update((role, (name, option)) for role, option in zip(pool.roles, pool.option.members, strict=True))
    hosted = {role: "+".join(roles) for roles in functions for role in roles}
    models = {
        role: _plan_model(*chosen[role], workload)
        if role in chosen
        else ModelPlan(pool=hosted[role], backend=FUNCTION_BACKEND)
        for role in dataflow.roles
    }
    stages = _estimate_stages(dataflow, named)
    slot = (MachinePlan(gpu_kind=HOST_KIND, slots=1),)
    host = tuple(PoolPlan(name=name, machines=slot) for name in dict.fromkeys(hosted.values()))
    return MappingPlan(
        pools=(*(_plan_pool(name, pool, cluster) for name, pool in named.items()), *host),
        models=models,
        estimates=PlanEstimates(
            iteration_s=sum(stage.latency_s for stage in stages),
            stages=stages,
            pools={name: _estimate_pool(pool, cluster) for name, pool in named.items()},
            models={role: _estimate_model(chosen[role][1]) for role in dataflow.roles if role in chosen},
            idle_gpus=cluster.num_gpus - sum(pool.option.request.num_gpus for pool in pools),
            search=search,
            largest_generation=_format_largest(workload),
            adapters=adapters,
        ),
    )


def find_machines(plan: MappingPlan, pool: str, kind: str) -> str:
    """The name of the pool's machines in the estimates; their kind where that was edited, or nothing is said."""
    estimate = plan.estimates.pools.get(pool) if plan.estimates else None
    name = estimate.machines if estimate else None
    return name if name and name.partition("#")[0] == kind else kind


def _plan_pool(name: str, pool: PoolPlacement, cluster: ClusterSpec) -> PoolPlan:
    return PoolPlan(
        name=name,
        machines=tuple(
            MachinePlan(gpu_kind=cluster.machines[place.machine].gpu.kind, slots=place.slots) for place in pool.slots
        ),
    )


def _plan_model(pool: str, option: ModelOption, workload: WorkloadSpec) -> ModelPlan:
    return ModelPlan(
        pool=pool,
        backend=option.backend,
        train=option.parallel,
        generation=option.generation,
        offload=option.host_bytes > 0,
        micro_batch_tokens=workload.micro_batch_tokens,
    )


def _estimate_stages(dataflow: Dataflow, pools: Mapping[str, PoolPlacement]) -> tuple[StageEstimate, ...]:
    stages = []
    for index, calls in enumerate(dataflow.stages()):
        waits_for = max(pools, key=lambda name: pools[name].option.stage_s[index])
        seconds = pools[waits_for].option.stage_s[index]
        names = tuple(f"{call.role}.{call.method}" for call in calls)
        stages.append(StageEstimate(calls=names, latency_s=seconds, waits_for=waits_for if seconds else None))
    return tuple(stages)


def estimate_adapters(
    dataflow: Dataflow, models: Mapping[str, ModelShape], workload: WorkloadSpec
) -> AdapterEstimate | None:
    """Their rank, and their parameters in each trained model; None where whole weights are trained."""
    if workload.adapters is None:
        return None
    trained = dict.fromkeys(call.role for call in dataflow.calls if call.kind == "training" and call.role in models)
    parameters = {role: count_adapter_parameters(models[role], workload.adapters) for role in trained}
    return AdapterEstimate(rank=workload.adapters.rank, parameters=parameters)


def _format_largest(workload: WorkloadSpec) -> str | None:
    largest = workload.largest_generation
    return None if largest is None else f"{largest.gen_pp_size}-{largest.gen_tp_size}"


def _estimate_model(option: ModelOption) -> ModelEstimate:
    return ModelEstimate(
        stage_s=tuple(option.stage_s),
        state_bytes=option.state_bytes,
        work_bytes=option.work_bytes,
        host_bytes=option.host_bytes,
        generation_waves=option.num_waves if option.generation else None,
    )


def _estimate_pool(pool: PoolPlacement, cluster: ClusterSpec) -> PoolEstimate:
    return PoolEstimate(
        stage_s=tuple(pool.option.stage_s),
        memory_bytes=pool.option.memory_bytes,
        usable_bytes=cluster.machines[pool.option.request.machine].gpu.usable_bytes,
        machines=cluster.names[pool.option.request.machine],
    )
