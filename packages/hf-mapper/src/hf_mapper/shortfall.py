"""Missing memory of a placement class, and the call that needs it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hf_mapper.config import MapperConfig
from hf_mapper.demand import ModelDemand
from hf_mapper.feasibility import find_least_memory
from hf_mapper.parallelism import ModelOption
from hf_mapper.placements import PoolRequest, fits
from hf_mapper.pools import PoolTable, build_table
from hf_mapper.simulators.inference import simulate_inference
from hf_mapper.simulators.training import simulate_training
from hf_mapper.specs import ClusterSpec

__all__ = ["Shortfall", "find_shortfall"]

_ROOMY_BYTES = 2**60
"""Memory that any layout fits into, so that layouts that are too large are listed as well."""


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """The pool of a class that runs out of memory, under the allocation that comes closest to fitting.

    `missing_bytes` per device of `roles`' pool of `num_gpus`; `role.method` is the call that needs most in
    addition to the states of all of them.
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
