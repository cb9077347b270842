"""From the search's answer to the plan: names of pools, machines, and the estimates that the choice rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_mapper.adapters import count_adapter_parameters
from hf_mapper.search.parallelism import ModelOption
from hf_mapper.search.placements import Slots
from hf_mapper.search.pools import PoolOption
from hf_mapper.specs import HOST_KIND, ClusterSpec, WorkloadSpec
from hf_protocols import Dataflow, MachinePlan, MappingPlan, ModelPlan, ModelShape, PoolPlan

__all__ = ["FUNCTION_BACKEND", "PoolPlacement", "build_plan", "describe_adapters", "find_machines"]

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
    functions: Sequence[str],
    search: Mapping[str, Any],
) -> MappingPlan:
    """The plan of `pools` and of one host slot for each of `functions`; roles in the dataflow's order.

    A pool is named after its roles, joined by `+`. `estimates` has `iteration_s`; per stage its calls, its time
    and the pool that it waits for; per pool its time in each stage, bytes used and usable per device, and the name of
    its machines (`ClusterSpec.names`); per model its time in each stage, state, work and host bytes per device and
    generation waves; the idle devices; `search`; and, as `pp-tp`, the sizes that `largest_generation` allowed, or
    None.
    """
    order = {role: number for number, role in enumerate(dataflow.roles)}
    named = {"+".join(sorted(pool.roles, key=order.__getitem__)): pool for pool in pools}
    named = dict(sorted(named.items(), key=lambda item: min(order[role] for role in item[1].roles)))
    chosen: dict[str, tuple[str, ModelOption]] = {}
    for name, pool in named.items():
        chosen.update((role, (name, option)) for role, option in zip(pool.roles, pool.option.members, strict=True))
    models = {
        role: _plan_model(*chosen[role], workload) if role in chosen else ModelPlan(pool=role, backend=FUNCTION_BACKEND)
        for role in dataflow.roles
    }
    host = tuple(PoolPlan(name=role, machines=(MachinePlan(gpu_kind=HOST_KIND, slots=1),)) for role in functions)
    return MappingPlan(
        pools=(*(_plan_pool(name, pool, cluster) for name, pool in named.items()), *host),
        models=models,
        estimates=_build_estimates(dataflow, cluster, named, chosen, search)
        | {"largest_generation": _format_largest(workload)},
    )


def find_machines(plan: MappingPlan, pool: str, kind: str) -> str:
    """The name of the pool's machines in the estimates; their kind where that was edited, or nothing is said."""
    estimates = plan.estimates.get("pools", {})
    of_pool = estimates.get(pool, {}) if isinstance(estimates, Mapping) else {}
    name = of_pool.get("machines", kind) if isinstance(of_pool, Mapping) else kind
    return name if isinstance(name, str) and name.partition("#")[0] == kind else kind


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


def _build_estimates(
    dataflow: Dataflow,
    cluster: ClusterSpec,
    pools: Mapping[str, PoolPlacement],
    chosen: Mapping[str, tuple[str, ModelOption]],
    search: Mapping[str, Any],
) -> dict[str, Any]:
    stages: list[dict[str, Any]] = []
    for index, calls in enumerate(dataflow.stages()):
        waits_for = max(pools, key=lambda name: pools[name].option.stage_s[index])
        seconds = pools[waits_for].option.stage_s[index]
        names = [f"{call.role}.{call.method}" for call in calls]
        stages.append({"calls": names, "latency_s": seconds, "waits_for": waits_for if seconds else None})
    used = sum(pool.option.request.num_gpus for pool in pools.values())
    return {
        "iteration_s": sum(stage["latency_s"] for stage in stages),
        "stages": stages,
        "pools": {name: _estimate_pool(pool, cluster) for name, pool in pools.items()},
        "models": {role: _estimate_model(chosen[role][1]) for role in dataflow.roles if role in chosen},
        "idle_gpus": cluster.num_gpus - used,
        "search": dict(search),
    }


def describe_adapters(
    dataflow: Dataflow, models: Mapping[str, ModelShape], workload: WorkloadSpec
) -> dict[str, dict[str, Any]]:
    """The estimate `adapters`: their rank, and their parameters in each trained model.

    It is absent where whole weights are trained.
    """
    if workload.adapters is None:
        return {}
    trained = dict.fromkeys(call.role for call in dataflow.calls if call.kind == "training" and call.role in models)
    parameters = {role: count_adapter_parameters(models[role], workload.adapters) for role in trained}
    return {"adapters": {"rank": workload.adapters.rank, "parameters": parameters}}


def _format_largest(workload: WorkloadSpec) -> str | None:
    largest = workload.largest_generation
    return None if largest is None else f"{largest.gen_pp_size}-{largest.gen_tp_size}"


def _estimate_model(option: ModelOption) -> dict[str, Any]:
    return {
        "stage_s": list(option.stage_s),
        "state_bytes": option.state_bytes,
        "work_bytes": option.work_bytes,
        "host_bytes": option.host_bytes,
        "generation_waves": option.num_waves if option.generation else None,
    }


def _estimate_pool(pool: PoolPlacement, cluster: ClusterSpec) -> dict[str, Any]:
    return {
        "stage_s": list(pool.option.stage_s),
        "memory_bytes": pool.option.memory_bytes,
        "usable_bytes": cluster.machines[pool.option.request.machine].gpu.usable_bytes,
        "machines": cluster.names[pool.option.request.machine],
    }
