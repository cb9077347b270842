"""Memory alone, without times: decide if models fit a cluster, and find the smallest cluster that they fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hf_mapper.config import MapperConfig
from hf_mapper.search.demand import build_demands
from hf_mapper.search.parallelism import ModelOption
from hf_mapper.search.placements import PoolRequest, fits, set_partitions
from hf_mapper.search.pools import PoolTable, build_table
from hf_mapper.specs import ClusterSpec, MachineSpec, WorkloadSpec
from hf_protocols import Dataflow, ModelShape, PlanError

__all__ = ["build_infeasible_error", "find_least_memory", "find_smallest_cluster", "is_feasible"]

_MOST_GPUS = 2048


def is_feasible(
    dataflow: Dataflow,
    models: Mapping[str, ModelShape],
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    *,
    backends: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
) -> bool:
    """Returns True if any placement of the models fits the cluster's memory.

    Raises:
        PlanError, ConfigError: as `map_dataflow` does for its inputs.
    """
    problem = MapperConfig(dataflow=dataflow, models=models, cluster=cluster, workload=workload, backends=backends)
    allocations = _least_allocations(problem)
    return any(fits(cluster, requests) for requests in allocations)


def find_smallest_cluster(
    dataflow: Dataflow,
    models: Mapping[str, ModelShape],
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    *,
    backends: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
) -> MachineSpec | None:
    """Returns the fewest machines of one of the cluster's kinds on which the models fit, up to 2,048 accelerators.

    With several kinds of machine, of the kind that needs the fewest accelerators. None if no number is enough.
    """
    problem = MapperConfig(dataflow=dataflow, models=models, cluster=cluster, workload=workload, backends=backends)
    found = []
    for machine in cluster.machines:
        most = max(1, _MOST_GPUS // machine.num_gpus)
        network = cluster.inter_bandwidth_bytes_per_s or machine.link_bandwidth_bytes_per_s
        largest = replace(cluster, machines=(replace(machine, num_machines=most),), inter_bandwidth_bytes_per_s=network)
        allocations = _least_allocations(replace(problem, cluster=largest))
        counts = [_count_machines(largest, requests) for requests in allocations]
        found += [replace(machine, num_machines=count) for count in counts if count <= most]
    return min(found, key=lambda machine: machine.total_gpus, default=None)


def build_infeasible_error(problem: MapperConfig) -> PlanError:
    """Returns the error for a cluster on which nothing fits, with the smallest cluster that is sufficient."""
    machines = problem.cluster.machines
    given = " + ".join(map(_describe, machines))
    names = ", ".join(f"{role} {model.name}" for role, model in problem.models.items())
    smallest = find_smallest_cluster(
        problem.dataflow, problem.models, problem.cluster, problem.workload, backends=problem.backends
    )
    knobs = "Lower micro_batch_tokens, the batch or the lengths, or raise max_generation_waves"
    own = []
    if (largest := problem.workload.largest_generation) is not None:
        own.append(f"largest_generation above {largest}")
    if not any(machine.offload_bytes for machine in machines):
        own.append("host_memory_bytes of the machines, to offload models")
    if own:
        knobs += f", or set in a problem of hf-mapper {' or '.join(own)}"
    if smallest is None:
        advice = f", nor of any number of such machines up to {_MOST_GPUS} devices. {knobs}"
    else:
        advice = f". The smallest cluster that would do is {_describe(smallest)}. {knobs}"
    return PlanError(f"{problem.dataflow.name}: no placement of {names} fits the memory of {given}{advice}")


def _least_allocations(problem: MapperConfig) -> Iterator[tuple[PoolRequest, ...]]:
    """For every partition, the fewest devices of each kind that hold each set; `pack` favours smaller requests."""
    demands = build_demands(problem.dataflow, problem.models, problem.workload, problem.backends)
    table = build_table(problem, demands)
    least: dict[tuple[int, ...], list[PoolRequest]] = {}
    for partition in set_partitions([table.demands.index(demand) for demand in demands.values()]):
        sets = [tuple(sorted(members)) for members in partition]
        for members in sets:
            if members not in least:
                least[members] = _find_least(table, members)
        yield from itertools.product(*(least[members] for members in sets))


def _count_machines(cluster: ClusterSpec, requests: Sequence[PoolRequest]) -> int:
    """The fewest machines of the cluster's only kind into which `requests` pack."""
    devices = sum(request.num_gpus for request in requests)
    count = -(-devices // cluster.machine.num_gpus)
    while not fits(replace(cluster, machines=(replace(cluster.machine, num_machines=count),)), requests):
        count += 1
    return count


def _find_least(table: PoolTable, members: tuple[int, ...]) -> list[PoolRequest]:
    """The fewest devices of each kind of machine on which the members fit side by side."""
    found = []
    for kind, machine in enumerate(table.cluster.machines):
        for count in table.device_counts(members, kind):
            request = PoolRequest(machine=kind, num_gpus=count)
            options = [table.options(member, request) for member in members]
            needed, _ = find_least_memory(options, machine.offload_bytes)
            if needed <= machine.gpu.usable_bytes:
                found.append(request)
                break
    return found


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


def _describe(machine: MachineSpec) -> str:
    count = machine.num_machines
    return (
        f"{count} machine{'s' if count > 1 else ''} of {machine.num_gpus} x {machine.gpu.kind} "
        f"({machine.gpu.memory_bytes / 2**30:.4g} GiB each)"
    )
