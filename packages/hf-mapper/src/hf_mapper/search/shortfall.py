"""The memory that a set of pools lacks on a cluster: how much, and in which call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hf_mapper.config import MapperConfig
from hf_mapper.search.demand import ModelDemand
from hf_mapper.search.parallelism import ModelOption
from hf_mapper.search.placements import PoolRequest, fits
from hf_mapper.search.pools import PoolTable, build_table
from hf_mapper.simulators.generation import simulate_generation
from hf_mapper.simulators.inference import simulate_inference
from hf_mapper.simulators.training import simulate_training
from hf_mapper.specs import ClusterSpec

__all__ = ["Shortfall", "count_devices", "find_least_memory", "find_shortfall"]

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

    def describe(self) -> str:
        """Returns the missing memory, the call and the devices, in a few words."""
        devices = ("each of " if self.num_gpus > 1 else "") + count_devices(self.num_gpus)
        call = self.method if self.role in self.method else f"{self.role}.{self.method}"
        return f"{self.missing_bytes / _GIB:.1f} GiB in {call}, on {devices}"


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
    if option.generation is not None:
        work["generation"] = simulate_generation(
            *given, generation=option.generation, num_waves=option.num_waves, backend=option.backend
        ).memory_bytes
    kind = max(work, key=work.__getitem__)
    call = next(call for call in problem.dataflow.calls if call.role == role and call.kind == kind)
    return role, call.method


def find_least_memory(
    options: Sequence[Sequence[ModelOption]], offload_bytes: float
) -> tuple[float, tuple[ModelOption, ...]]:
    """The least bytes per device, states and largest work, of one option of each model; and these options.

    Together they have at most `offload_bytes` in host memory. Infinity and nothing where a model has no option.
    """
    least: tuple[float, tuple[ModelOption, ...]] = (float("inf"), ())
    for limit in sorted({option.work_bytes for of_model in options for option in of_model}):
        for chosen in itertools.product(*(_find_least_states(of_model, limit) for of_model in options)):
            if sum(option.host_bytes for option in chosen) <= offload_bytes:
                states = sum(option.state_bytes for option in chosen)
                needed = states + max(option.work_bytes for option in chosen)
                least = min(least, (needed, chosen), key=lambda entry: entry[0])
    return least


def _find_least_states(options: Sequence[ModelOption], limit: float) -> list[ModelOption]:
    """Of the options with work up to `limit` the one with the least state, and of the offloaded ones likewise."""
    within = [option for option in options if option.work_bytes <= limit]
    resting = [[option for option in within if (option.host_bytes > 0) == offloaded] for offloaded in (False, True)]
    return [min(some, key=lambda option: option.state_bytes + option.host_bytes) for some in resting if some]


def count_devices(count: int) -> str:
    """Returns `"1 device"` or `"8 devices"`."""
    return f"{count} device{'s' * (count > 1)}"
