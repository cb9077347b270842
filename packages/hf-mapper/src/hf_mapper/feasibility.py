"""Whether models fit a cluster at all, and the smallest cluster on which they would: memory alone, no times."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hf_mapper.demand import build_demands, number_demands
from hf_mapper.parallelism import ModelOption
from hf_mapper.placements import PoolRequest, pack, set_partitions
from hf_mapper.pools import PoolTable
from hf_mapper.specs import ClusterSpec, MachineSpec, WorkloadSpec
from hf_protocols import Dataflow, ModelShape, PlanError

__all__ = ["build_infeasible_error", "find_smallest_cluster", "is_feasible"]

_MOST_GPUS = 2048


def is_feasible(
    dataflow: Dataflow,
    models: Mapping[str, ModelShape],
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    *,
    backends: Sequence[str] | None = None,
) -> bool:
    """Whether any placement of the models fits the cluster's memory.

    Raises:
        PlanError, ConfigError: as ``map_dataflow`` does for its inputs.
    """
    demands = tuple(build_demands(dataflow, models, workload).values())
    numbered = number_demands(demands)
    table = PoolTable(demands=numbered, cluster=cluster, workload=workload, backends=backends)
    least: dict[tuple[int, ...], list[PoolRequest]] = {}
    for partition in set_partitions([numbered.index(demand) for demand in demands]):
        sets = [tuple(sorted(members)) for members in partition]
        for members in sets:
            if members not in least:
                least[members] = _find_least(table, members)
        choices = itertools.product(*(least[members] for members in sets))
        if any(pack(cluster, requests) is not None for requests in choices):
            return True
    return False


def find_smallest_cluster(
    dataflow: Dataflow,
    models: Mapping[str, ModelShape],
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    *,
    backends: Sequence[str] | None = None,
) -> MachineSpec | None:
    """The fewest machines of one of the cluster's kinds on which the models fit, up to 2,048 accelerators.

    Of several kinds the one that needs the fewest accelerators. None when no number of them would do.
    """
    found = []
    for machine in cluster.machines:
        network = cluster.inter_bandwidth_bytes_per_s or machine.link_bandwidth_bytes_per_s

        def fits(count: int, machine: MachineSpec = machine, network: float = network) -> bool:
            grown = (replace(machine, num_machines=count),)
            larger = replace(cluster, machines=grown, inter_bandwidth_bytes_per_s=network)
            return is_feasible(dataflow, models, larger, workload, backends=backends)

        low, high, most = 0, 1, max(1, _MOST_GPUS // machine.num_gpus)
        while high < most and not fits(high):
            low, high = high, min(2 * high, most)
        if not fits(high):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        found.append(replace(machine, num_machines=high))
    return min(found, key=lambda machine: machine.total_gpus, default=None)


def build_infeasible_error(
    dataflow: Dataflow,
    models: Mapping[str, ModelShape],
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    backends: Sequence[str] | None,
) -> PlanError:
    """The error for a cluster on which nothing fits: what was given, and the smallest cluster that would do."""
    given = " + ".join(_describe(machine) for machine in cluster.machines)
    names = ", ".join(f"{role} {model.name}" for role, model in models.items())
    smallest = find_smallest_cluster(dataflow, models, cluster, workload, backends=backends)
    knobs = "micro_batch_tokens, the batch or the lengths lower, or max_generation_waves higher"
    if smallest is None:
        advice = f"nor on any number of such machines up to {_MOST_GPUS} devices: set {knobs}"
    else:
        advice = f"the smallest cluster that would do: {_describe(smallest)}; or set {knobs}"
    return PlanError(f"{dataflow.name}: no placement of {names} fits the memory of {given}; {advice}")


def _find_least(table: PoolTable, members: tuple[int, ...]) -> list[PoolRequest]:
    """The fewest devices of each kind of machine on which the members fit side by side."""
    found = []
    for kind, machine in enumerate(table.cluster.machines):
        for count in range(1, machine.total_gpus + 1):
            request = PoolRequest(machine=kind, num_gpus=count)
            if _fit_together([table.options(member, request) for member in members], machine.gpu.usable_bytes):
                found.append(request)
                break
    return found


def _fit_together(options: Sequence[Sequence[ModelOption]], usable_bytes: float) -> bool:
    """Whether one option of each model can be chosen so that the states and the largest work fit."""
    limits = {option.work_bytes for of_model in options for option in of_model}
    for limit in limits:
        states = [
            min((option.state_bytes for option in of_model if option.work_bytes <= limit), default=float("inf"))
            for of_model in options
        ]
        if sum(states) + limit <= usable_bytes:
            return True
    return False


def _describe(machine: MachineSpec) -> str:
    count = machine.num_machines
    return (
        f"{count} machine{'s' if count > 1 else ''} of {machine.num_gpus} x {machine.gpu.kind} "
        f"({machine.gpu.memory_bytes / 2**30:.4g} GiB each)"
    )
