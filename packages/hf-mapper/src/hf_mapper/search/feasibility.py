"""Memory alone, without times: decide if models fit a cluster, and find the smallest cluster that they fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hf_mapper.config import MapperConfig
from hf_mapper.search.demand import build_demands
from hf_mapper.search.placements import PoolRequest, fits, set_partitions
from hf_mapper.search.pools import PoolTable, build_table
from hf_mapper.search.shortfall import find_least_memory
from hf_mapper.specs import ClusterSpec, MachineSpec, WorkloadSpec
from hf_protocols import Dataflow, ModelShape

__all__ = ["MOST_GPUS", "find_smallest_cluster", "is_feasible"]

MOST_GPUS = 2048
"""Accelerators of the largest cluster that `find_smallest_cluster` tries."""


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
        most = max(1, MOST_GPUS // machine.num_gpus)
        network = cluster.inter_bandwidth_bytes_per_s or machine.link_bandwidth_bytes_per_s
        largest = replace(cluster, machines=(replace(machine, num_machines=most),), inter_bandwidth_bytes_per_s=network)
        allocations = _least_allocations(replace(problem, cluster=largest))
        counts = [_count_machines(largest, requests) for requests in allocations]
        found += [replace(machine, num_machines=count) for count in counts if count <= most]
    return min(found, key=lambda machine: machine.total_gpus, default=None)


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
