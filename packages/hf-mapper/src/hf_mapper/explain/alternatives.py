"""The best plan of every placement class, and the reason that it loses against the chosen plan.

A class that does not fit says how much memory is missing, and to which call.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_mapper.config import MapperConfig
from hf_mapper.search.demand import ModelDemand, build_demands
from hf_mapper.search.exact_search import StopSign, compute_cost, search_partitions
from hf_mapper.search.feasibility import find_least_memory
from hf_mapper.search.parallelism import ModelOption
from hf_mapper.search.placements import PoolRequest, fits, set_partitions
from hf_mapper.search.planning import PoolPlacement
from hf_mapper.search.pools import PoolTable, build_table
from hf_mapper.simulators.inference import simulate_inference
from hf_mapper.simulators.training import simulate_training
from hf_mapper.specs import ClusterSpec

__all__ = ["Alternative", "Shortfall", "compare_classes", "find_shortfall"]

_ROOMY_BYTES = 2**60
"""Memory that any layout fits into, so that layouts that are too large are listed as well."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """The pool of a class that runs out of memory, under the allocation that comes closest to fitting.

    `missing_bytes` is the memory that each of the `num_gpus` devices of the pool of `roles` lacks. `role.method` is the
    call that needs the most memory in addition to the states of all these roles.
    """

    roles: tuple[str, ...]
    num_gpus: int
    role: str
    method: str
    missing_bytes: float


@dataclass(frozen=True, kw_only=True)
class _Try:
    request: PoolRequest
    missing_bytes: float
    roles: tuple[str, ...]
    options: tuple[ModelOption, ...]


def find_shortfall(
    problem: MapperConfig, demands: Mapping[str, ModelDemand], sets: Sequence[tuple[str, ...]]
) -> Shortfall | None:
    """Returns the least memory that `sets`, each on its own pool, lack on the cluster; None for too few devices."""
    roomy = replace(
        problem.cluster,
        machines=tuple(
            replace(machine, gpu=replace(machine.gpu, memory_bytes=_ROOMY_BYTES, reserved_bytes=0))
            for machine in problem.cluster.machines
        ),
    )
    table = build_table(replace(problem, cluster=roomy), demands)
    tries = [_list_tries(table, problem.cluster, demands, roles) for roles in sets]
    limits = sorted({entry.missing_bytes for of_set in tries for entry in of_set})
    low, high = 0, len(limits)
    while low < high:  # the least limit under which every set finds devices
        middle = (low + high) // 2
        low, high = (low, middle) if _choose(problem.cluster, tries, limits[middle]) else (middle + 1, high)
    chosen = _choose(problem.cluster, tries, limits[low]) if low < len(limits) else None
    if chosen is None:
        return None
    worst = max(chosen, key=lambda entry: entry.missing_bytes)
    part = problem.cluster.only(worst.request.machine)
    role, method = _find_call(problem, demands, worst, part)
    return Shortfall(
        roles=worst.roles,
        num_gpus=worst.request.num_gpus,
        role=role,
        method=method,
        missing_bytes=worst.missing_bytes,
    )


def _list_tries(
    table: PoolTable, cluster: ClusterSpec, demands: Mapping[str, ModelDemand], roles: tuple[str, ...]
) -> list[_Try]:
    """The set on every number of devices of every kind, in the layouts that need the least memory together."""
    members = tuple(table.demands.index(demands[role]) for role in roles)
    found = []
    for kind, machine in enumerate(cluster.machines):
        for count in table.device_counts(tuple(sorted(members)), kind):
            request = PoolRequest(machine=kind, num_gpus=count)
            every = [table.options(member, request) for member in members]
            needed, options = find_least_memory(every, machine.offload_bytes)
            missing = needed - machine.gpu.usable_bytes
            found.append(_Try(request=request, missing_bytes=missing, roles=roles, options=options))
    return found


def _choose(cluster: ClusterSpec, tries: Sequence[Sequence[_Try]], limit: float) -> tuple[_Try, ...] | None:
    """For each set the fewest devices of a kind on which it lacks at most `limit`; None where they do not fit."""
    least: list[list[_Try]] = []
    for of_set in tries:
        within = [entry for entry in of_set if entry.missing_bytes <= limit]
        kinds: dict[int, _Try] = {}
        for entry in sorted(within, key=lambda entry: entry.request.num_gpus):
            kinds.setdefault(entry.request.machine, entry)
        least.append(list(kinds.values()))
    for chosen in itertools.product(*least):
        if fits(cluster, [entry.request for entry in chosen]):
            return chosen
    return None


def _find_call(
    problem: MapperConfig, demands: Mapping[str, ModelDemand], worst: _Try, cluster: ClusterSpec
) -> tuple[str, str]:
    """Returns the role and method with the largest working memory in addition to the states."""
    index = max(range(len(worst.roles)), key=lambda number: worst.options[number].work_bytes)
    role, option = worst.roles[index], worst.options[index]
    given = (demands[role].model, cluster, option.parallel, problem.workload)
    work = {}
    if "training" in demands[role].kinds:
        work["training"] = simulate_training(*given, backend=option.backend).memory_bytes
    if "inference" in demands[role].kinds:
        work["inference"] = simulate_inference(*given, backend=option.backend).memory_bytes
    if option.generation is not None:  # what neither of the others accounts for
        largest = option.work_bytes - option.host_bytes
        work["generation"] = largest if largest > max(work.values(), default=0.0) else 0.0
    kind = max(work, key=work.__getitem__)
    call = next(call for call in problem.dataflow.calls if call.role == role and call.kind == kind)
    return role, call.method


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The best plan in which exactly these roles share pools.

    `name` is `"colocate"` (one pool), `"standalone"` (a pool for each), `"split"` (the actor with its
    reference, the others with each other) or empty. `num_gpus` of each pool and `iteration_s` are None where
    nothing fits; then `missing_bytes` is the shortfall of the fullest device, None if there are too few devices.
    `idle_part` of each pool is the part of the iteration in which it is idle. `reason` is one line on why the
    class loses.
    """

    name: str
    pools: tuple[tuple[str, ...], ...]
    chosen: bool
    reason: str
    num_gpus: tuple[int, ...] | None = None
    iteration_s: float | None = None
    idle_part: tuple[float, ...] | None = None
    missing_bytes: float | None = None


def compare_classes(
    problem: MapperConfig, chosen: Sequence[PoolPlacement], should_stop: StopSign, *, complete: bool
) -> tuple[Alternative, ...]:
    """Returns every placement class: the chosen one, then the others from fast to slow, then those that do not fit.

    If `should_stop` returns True, only classes whose best plan is known by then. `complete`: the search was complete.
    """
    demands = build_demands(problem.dataflow, problem.models, problem.workload, problem.backends)
    table = build_table(problem, demands)
    reason = "the fastest" if complete else "the best so far"
    own = frozenset(frozenset(pool.roles) for pool in chosen)
    found = []
    for partition in set_partitions(tuple(demands)):
        if frozenset(map(frozenset, partition)) == own:
            found.append(_describe(demands, partition, chosen, reason, chosen=True))
        elif not should_stop():
            pools, search = search_partitions(table, demands, [partition], should_stop)
            if search.complete:
                found.append(_compare(problem, demands, partition, pools, chosen))
    return tuple(sorted(found, key=_rank))


def _rank(entry: Alternative) -> tuple[bool, float, float]:
    seconds = float("inf") if entry.iteration_s is None else entry.iteration_s
    return not entry.chosen, seconds, float("inf") if entry.missing_bytes is None else entry.missing_bytes


def _compare(
    problem: MapperConfig,
    demands: Mapping[str, ModelDemand],
    partition: Sequence[tuple[str, ...]],
    pools: Sequence[PoolPlacement],
    chosen: Sequence[PoolPlacement],
) -> Alternative:
    if pools:
        return _describe(demands, partition, pools, _explain_loss(problem, pools, chosen), chosen=False)
    missing, reason = _explain_misfit(problem, demands, partition)
    name = _name_class(partition)
    return Alternative(name=name, pools=tuple(partition), chosen=False, reason=reason, missing_bytes=missing)


def _describe(
    demands: Mapping[str, ModelDemand],
    partition: Sequence[tuple[str, ...]],
    pools: Sequence[PoolPlacement],
    reason: str,
    *,
    chosen: bool,
) -> Alternative:
    seconds = np.array([pool.option.stage_s for pool in pools])
    iteration_s = compute_cost([pool.option.stage_s for pool in pools])
    order = {role: number for number, role in enumerate(demands)}
    return Alternative(
        name=_name_class(partition),
        pools=tuple(tuple(sorted(pool.roles, key=order.__getitem__)) for pool in pools),
        chosen=chosen,
        reason=reason,
        num_gpus=tuple(pool.option.request.num_gpus for pool in pools),
        iteration_s=iteration_s,
        idle_part=tuple(float(1 - own.sum() / iteration_s) if iteration_s else 0.0 for own in seconds),
    )


def _name_class(partition: Sequence[tuple[str, ...]]) -> str:
    sets = set(map(frozenset, partition))
    roles = frozenset().union(*sets)
    if len(sets) == 1:
        return "colocate"
    if len(sets) == len(roles):
        return "standalone"
    return "split" if sets == {frozenset({"actor", "reference"}), roles - {"actor", "reference"}} else ""


def _explain_misfit(
    problem: MapperConfig, demands: Mapping[str, ModelDemand], partition: Sequence[tuple[str, ...]]
) -> tuple[float | None, str]:
    short = find_shortfall(problem, demands, partition)
    if short is None:
        return None, f"{len(partition)} pools find no place among {_count_devices(problem.cluster.num_gpus)}"
    devices = ("each of " if short.num_gpus > 1 else "") + _count_devices(short.num_gpus)
    call = short.method if short.role in short.method else f"{short.role}.{short.method}"
    return short.missing_bytes, f"out of memory by {short.missing_bytes / _GIB:.1f} GiB in {call}, on {devices}"


def _count_devices(count: int) -> str:
    return f"{count} device{'s' * (count > 1)}"


def _explain_loss(problem: MapperConfig, pools: Sequence[PoolPlacement], chosen: Sequence[PoolPlacement]) -> str:
    """Returns how much slower the placement is, its slowest stage and the pool that waits most."""
    seconds, best = (np.array([pool.option.stage_s for pool in placed]) for placed in (pools, chosen))
    stage_s, best_s = seconds.max(axis=0), best.max(axis=0)
    if stage_s.sum() <= best_s.sum() * (1 + 1e-8):
        return "as fast: of equals the fewest pools win, then the fewest devices, then the first in order"
    stage = int((stage_s - best_s).argmax())
    slowest = pools[int(seconds[:, stage].argmax())]
    methods = dict.fromkeys(
        call.method
        for call in problem.dataflow.stages()[stage]
        if call.role in slowest.roles and call.kind != "function"
    )
    verb = "takes" if len(methods) == 1 else "take"
    parts = [
        f"{100 * (stage_s.sum() / best_s.sum() - 1):.1f} % slower",
        f"{' + '.join(methods)} {verb} {stage_s[stage] - best_s[stage]:.3g} s longer",
    ]
    idle = 1 - seconds.sum(axis=1) / stage_s.sum()
    idlest = int(idle.argmax())
    if idle[idlest] >= 0.005:
        roles = [role for role in problem.dataflow.roles if role in pools[idlest].roles]
        parts.append(f"{'+'.join(roles)} idle {100 * idle[idlest]:.0f} %")
    return ", ".join(parts)
