"""Error factors of the memory simulator within which a plan stays the best one and fits.

Models that need f times the predicted bytes fit if the predicted bytes fit into 1 / f of the memory. For f above 1
nothing new fits, so the plan stays the best as long as it fits itself. For f below 1 faster rivals begin to fit, one
after another. The factor at which a rival fits follows from its bytes, without a search. A search just above that
factor either finds a rival that fits earlier or proves that there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_mapper.config import MapperConfig
from hf_mapper.explain.robustness import MOST_FACTOR, list_pools
from hf_mapper.search.demand import build_demands
from hf_mapper.search.exact_search import StopSign, compute_cost, search_partitions
from hf_mapper.search.placements import set_partitions
from hf_mapper.search.planning import PoolPlacement
from hf_mapper.search.pools import build_table
from hf_mapper.specs import ClusterSpec, MachineSpec

__all__ = ["MemoryTolerance", "compute_memory_tolerance"]

_STEP = 1e-6
"""Relative step above the factor at which a rival fits, in the search for earlier rivals."""
_TIE = 1e-8
"""Relative difference below which two plans are equally fast, as in the search."""


@dataclass(frozen=True, kw_only=True)
class MemoryTolerance:
    """Factors on the bytes that models need, on devices and hosts, between which the plan stays optimal.

    At `optimal_from` a faster plan fits; `winner_below` has the roles of its pools. If no faster plan fits,
    `optimal_from` is `1 / MOST_FACTOR` and `winner_below` is empty. Above `optimal_to` the plan itself no longer fits.
    """

    optimal_from: float
    optimal_to: float
    winner_below: tuple[tuple[str, ...], ...]

    @property
    def largest_error(self) -> float:
        """The largest relative error, either way, under which the plan stays optimal."""
        return min(self.optimal_to - 1.0, 1.0 - self.optimal_from)


def compute_memory_tolerance(
    problem: MapperConfig, pools: Sequence[PoolPlacement], should_stop: StopSign
) -> MemoryTolerance | None:
    """The tolerance of the plan `pools` of `problem`; None if `should_stop` returns True before it is known."""
    chosen_s = compute_cost([pool.option.stage_s for pool in pools])
    winner: Sequence[PoolPlacement] = ()
    below, factor = 1 / MOST_FACTOR, 1 / MOST_FACTOR
    while factor < 1:
        best = _search(problem, factor, should_stop)
        if best is None:
            return None
        if compute_cost([pool.option.stage_s for pool in best]) >= chosen_s * (1 - _TIE):
            break
        winner, below = best, min(1.0, _find_largest_factor(problem.cluster, best))
        factor = max(factor, below) * (1 + _STEP)
    return MemoryTolerance(
        optimal_from=below,
        optimal_to=_find_largest_factor(problem.cluster, pools),
        winner_below=list_pools(problem, winner),
    )


def _search(problem: MapperConfig, factor: float, should_stop: StopSign) -> tuple[PoolPlacement, ...] | None:
    """The best pools where models need `factor` times the bytes; None for a search that was stopped."""
    if should_stop():
        return None
    machines = tuple(_share_memory(machine, factor) for machine in problem.cluster.machines)
    roomy = replace(problem, cluster=replace(problem.cluster, machines=machines))
    demands = build_demands(problem.dataflow, problem.models, problem.workload, problem.backends)
    table = build_table(roomy, demands)
    pools, search = search_partitions(table, demands, set_partitions(tuple(demands)), should_stop)
    return pools if search.complete else None


def _share_memory(machine: MachineSpec, factor: float) -> MachineSpec:
    """`machine` with 1 / `factor` of the memory that models may fill."""
    gpu = machine.gpu
    memory = gpu.reserved_bytes + int((gpu.memory_bytes - gpu.reserved_bytes) / factor)
    return replace(
        machine,
        gpu=replace(gpu, memory_bytes=memory),
        host_memory_bytes=int(machine.host_memory_bytes / factor),
    )


def _find_largest_factor(cluster: ClusterSpec, pools: Sequence[PoolPlacement]) -> float:
    """Returns the factor on the bytes at which the fullest device, or part of host memory, is full."""
    factors = []
    for pool in pools:
        machine = cluster.machines[pool.option.request.machine]
        factors.append(machine.gpu.usable_bytes / pool.option.memory_bytes)
        if host_bytes := sum(member.host_bytes for member in pool.option.members):
            factors.append(machine.offload_bytes / host_bytes)
    return min(factors)
