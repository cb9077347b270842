"""Bottlenecks of an iteration: the stage, the pool and the resource, and the gain from more of a resource."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_mapper.config import MapperConfig
from hf_mapper.explain.pricing import price_pools, stage_seconds
from hf_mapper.search.demand import build_demands
from hf_mapper.search.exact_search import StopSign, find_pools
from hf_mapper.search.planning import PoolPlacement
from hf_mapper.specs import ClusterSpec, MachineSpec

__all__ = ["Bottleneck", "Extension", "find_bottleneck", "try_extensions"]


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The longest stage: its number (from 0), calls, seconds and part of the iteration, and the pool it waits for.

    `saved_s` is what an iteration of the same layouts would save if a resource were twice as fast; `resource` is
    the one that would save the stage most.
    """

    stage: int
    calls: tuple[str, ...]
    latency_s: float
    part: float
    pool: tuple[str, ...]
    resource: str
    saved_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Extension:
    """The best plan with one more machine of a kind: its seconds, and the part of an iteration that it saves.

    `gpu_kind` is the name of the machines (`ClusterSpec.names`).
    """

    gpu_kind: str
    num_machines: int
    iteration_s: float
    saved_part: float
    idle_gpus: int


def find_bottleneck(problem: MapperConfig, pools: Sequence[PoolPlacement]) -> Bottleneck:
    """Finds the bottleneck of the plan `pools` by pricing it again with each resource twice as fast."""
    demands = build_demands(problem.dataflow, problem.models, problem.workload, problem.backends)

    def price(cluster: ClusterSpec) -> NDArray[np.float64]:
        return stage_seconds(price_pools(pools, demands, cluster, problem.workload))

    seconds = price(problem.cluster)
    stage_s = seconds.max(axis=0)
    stage = int(stage_s.argmax())
    faster = {name: price(change(problem.cluster)).max(axis=0) for name, change in _TWICE.items()}
    order = {role: number for number, role in enumerate(demands)}
    return Bottleneck(
        stage=stage,
        calls=tuple(f"{call.role}.{call.method}" for call in problem.dataflow.stages()[stage]),
        latency_s=float(stage_s[stage]),
        part=float(stage_s[stage] / stage_s.sum()),
        pool=tuple(sorted(pools[int(seconds[:, stage].argmax())].roles, key=order.__getitem__)),
        resource=min(faster, key=lambda name: faster[name][stage]),
        saved_s={name: float(stage_s.sum() - other.sum()) for name, other in faster.items()},
    )


def try_extensions(problem: MapperConfig, iteration_s: float, should_stop: StopSign) -> tuple[Extension, ...]:
    """Tries one more machine of each kind in turn; empty if the cluster states no network between machines.

    If `should_stop` returns True, the result has only the machines whose best plan is known by then.
    """
    if problem.cluster.inter_bandwidth_bytes_per_s is None:
        return ()
    found = []
    for index, machine in enumerate(problem.cluster.machines):
        if should_stop():
            break
        more = replace(machine, num_machines=machine.num_machines + 1)
        machines = (*problem.cluster.machines[:index], more, *problem.cluster.machines[index + 1 :])
        cluster = replace(problem.cluster, machines=machines)
        plan, _ = find_pools(replace(problem, cluster=cluster), should_stop)
        estimates = plan.require_estimates()
        if not estimates.search.complete:
            break
        found.append(
            Extension(
                gpu_kind=problem.cluster.names[index],
                num_machines=more.num_machines,
                iteration_s=estimates.iteration_s,
                saved_part=1 - estimates.iteration_s / iteration_s,
                idle_gpus=estimates.idle_gpus,
            )
        )
    return tuple(found)


def _on_machines(change: Callable[[MachineSpec], MachineSpec]) -> Callable[[ClusterSpec], ClusterSpec]:
    return lambda cluster: replace(cluster, machines=tuple(map(change, cluster.machines)))


def _twice_the_arithmetic(machine: MachineSpec) -> MachineSpec:
    peaks = {dtype: 2 * peak for dtype, peak in machine.gpu.peak_flops_per_s.items()}
    return replace(machine, gpu=replace(machine.gpu, peak_flops_per_s=peaks))


def _twice_the_memory_speed(machine: MachineSpec) -> MachineSpec:
    speed = 2 * machine.gpu.memory_bandwidth_bytes_per_s
    return replace(machine, gpu=replace(machine.gpu, memory_bandwidth_bytes_per_s=speed))


def _twice_the_links(machine: MachineSpec) -> MachineSpec:
    return replace(machine, intra_bandwidth_bytes_per_s=2 * machine.link_bandwidth_bytes_per_s)


def _twice_the_host_links(machine: MachineSpec) -> MachineSpec:
    return replace(
        machine, gpu=replace(machine.gpu, host_bandwidth_bytes_per_s=2 * machine.gpu.host_bandwidth_bytes_per_s)
    )


def _half_the_launches(machine: MachineSpec) -> MachineSpec:
    constants = machine.gpu.efficiency
    halves = {
        name: getattr(constants, name) / 2 for name in ("training_latency_s", "layer_latency_s", "sequence_latency_s")
    }
    gpu = replace(machine.gpu, efficiency=replace(constants, **halves))
    return replace(machine, gpu=gpu, intra_latency_s=machine.intra_latency_s / 2)


def _twice_the_network(cluster: ClusterSpec) -> ClusterSpec:
    speed = cluster.inter_bandwidth_bytes_per_s
    return replace(cluster, inter_bandwidth_bytes_per_s=None if speed is None else 2 * speed)


_TWICE: dict[str, Callable[[ClusterSpec], ClusterSpec]] = {
    "arithmetic": _on_machines(_twice_the_arithmetic),
    "memory bandwidth": _on_machines(_twice_the_memory_speed),
    "links inside a machine": _on_machines(_twice_the_links),
    "links to the host": _on_machines(_twice_the_host_links),
    "network between machines": _twice_the_network,
    "launches and latencies": _on_machines(_half_the_launches),
}
