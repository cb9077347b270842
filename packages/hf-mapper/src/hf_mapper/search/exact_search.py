"""The exact search: set partitions x allocations x layouts, under the simulators' cost and one `pack`.

The cost has the form of the paper's cost (Algorithm 1). A pool's time in a stage is the sum over its models; a stage's
time is the maximum over pools; an iteration's time is the sum over stages. In addition to the paper's terms, a model's
time includes the transition, rows received from and sent to other models, and, for an offloaded model, moves to host
memory and back. Idle devices are allowed. Costs that agree in nine digits are ties: the fewest pools win, then the
fewest devices, then the first in a fixed order.

The bound: in no stage is a pool faster than the sum of its models' fastest times. The fastest time of a model is its
time alone on any pool with all memory to itself. A partition whose bound cannot win is skipped. After a stopped search,
the least bound of the rest gives the largest possible distance of the result from the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hf_mapper.config import MapperConfig
from hf_mapper.search.demand import ModelDemand, build_demands, group_functions
from hf_mapper.search.infeasibility import build_infeasible_error
from hf_mapper.search.placements import PoolRequest, fits, pack, set_partitions
from hf_mapper.search.planning import PoolPlacement, build_plan, estimate_adapters
from hf_mapper.search.pools import PoolOption, PoolTable, build_table
from hf_mapper.specs import ClusterSpec, WorkloadSpec
from hf_protocols import Dataflow, MappingPlan, ModelShape, SearchEstimate

__all__ = ["StopSign", "compute_cost", "find_pools", "map_dataflow", "search_partitions"]

StopSign = Callable[[], bool]
"""Returns True to stop; after that it is not called again."""

_TIE = 1e-8
"""Larger than the difference of costs that agree in nine digits."""


def map_dataflow(
    dataflow: Dataflow,
    models: Mapping[str, ModelShape],
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    should_stop: StopSign | None = None,
    *,
    backends: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
) -> MappingPlan:
    """Finds the placement, allocation and layouts with the shortest iteration.

    Roles without a model (a reward function, advantages) get host slots, in addition to the cluster's. Those that wait
    for one another anyway share one.
    `should_stop` is called between candidates once a plan is known. When it returns True, the best plan so far is
    returned and `estimates.search.complete` is False. Its `gap` is proven: no plan takes less than
    `iteration_s * (1 - gap)`; after a complete search it is 0. `backends` are the training backends to choose from,
    for all roles or by role; by default FSDP on host slots, and FSDP and Megatron on accelerators.

    Raises:
        PlanError: if nothing fits, naming the smallest sufficient cluster, or if a role lacks its model.
        ConfigError: for an unknown role or backend, or a workload that a model cannot take.
    """
    problem = MapperConfig(dataflow=dataflow, models=models, cluster=cluster, workload=workload, backends=backends)
    return find_pools(problem, should_stop)[0]


def find_pools(
    problem: MapperConfig, should_stop: StopSign | None = None
) -> tuple[MappingPlan, tuple[PoolPlacement, ...]]:
    """Returns the plan of `map_dataflow` and its pools."""
    demands = build_demands(problem.dataflow, problem.models, problem.workload, problem.backends)
    table = build_table(problem, demands)
    with np.errstate(over="ignore", invalid="ignore"):  # seconds beyond a float make an error of one line
        pools, search = search_partitions(table, demands, set_partitions(tuple(demands)), should_stop)
        if not pools:
            raise build_infeasible_error(problem)
    functions = group_functions(problem.dataflow, problem.models)
    plan = build_plan(
        problem.dataflow,
        problem.cluster,
        problem.workload,
        pools=pools,
        functions=functions,
        search=search,
        adapters=estimate_adapters(problem.dataflow, problem.models, problem.workload),
    )
    return plan, pools


def search_partitions(
    table: PoolTable,
    demands: Mapping[str, ModelDemand],
    partitions: Iterable[Sequence[Sequence[str]]],
    should_stop: StopSign | None = None,
) -> tuple[tuple[PoolPlacement, ...], SearchEstimate]:
    """Returns the best pools among `partitions` of the roles, empty if nothing fits, and facts about the search."""
    number_of = {role: table.demands.index(demand) for role, demand in demands.items()}
    search = _Search(table=table, number_of=number_of, should_stop=should_stop or (lambda: False))
    for partition in partitions:
        search.try_partition([tuple(sorted(roles, key=lambda role: number_of[role])) for roles in partition])
    found = SearchEstimate(complete=not search.stopped, gap=search.gap, placements_tried=search.placements_tried)
    return search.best, found


def compute_cost(stage_s_of_pools: Sequence[Sequence[float]]) -> float:
    """Returns seconds of an iteration: the sum over stages of the slowest pool's time."""
    return sum(map(max, zip(*stage_s_of_pools, strict=True)), 0.0)


def _rounded(cost: float) -> float:
    """Rounds `cost` to nine digits, the resolution at which two costs differ."""
    return float(f"{cost:.8e}")


@dataclass(kw_only=True)
class _Search:
    """Depth-first search over the pools of each partition, pruned where no completion can win."""

    table: PoolTable
    number_of: Mapping[str, int]
    should_stop: StopSign
    best: tuple[PoolPlacement, ...] = ()
    best_key: tuple[float, int, int] = (float("inf"), 0, 0)
    placements_tried: int = 0
    stopped: bool = False
    _open_s: float = float("inf")
    _sets: list[tuple[str, ...]] = field(default_factory=list)
    _options: list[tuple[PoolOption, ...]] = field(default_factory=list)
    _stage_s: list[NDArray[np.float64]] = field(default_factory=list)
    _rest_s: list[NDArray[np.float64]] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """The part of the best plan's time that is not proven to be needed: 0 after a complete search."""
        best_s = compute_cost([pool.option.stage_s for pool in self.best])
        return max(0.0, 1 - self._open_s / best_s) if self.stopped and best_s else 0.0

    def try_partition(self, sets: Sequence[tuple[str, ...]]) -> None:
        """Searches the allocations of one partition; `best` is updated if one of them wins."""
        least_s = self._fastest_s(sets)
        options: dict[tuple[str, ...], tuple[PoolOption, ...]] = {}
        for roles in sets:
            if self._must_stop():
                self._open_s = min(self._open_s, least_s)
                return
            if (_rounded(least_s), len(sets), len(sets)) >= self.best_key:
                return
            options[roles] = self.table.pool_options(tuple(self.number_of[role] for role in roles))
            if not options[roles]:
                return
        # The slowest set first: it moves the bound most.
        self._sets = sorted(sets, key=lambda roles: -sum(options[roles][0].stage_s))
        self._options = [options[roles] for roles in self._sets]
        # From the set at an index on, no stage can be faster than this for any allocation of the rest.
        self._stage_s = [np.array([option.stage_s for option in of_set]) for of_set in self._options]
        fastest = [stage_s.min(axis=0) for stage_s in self._stage_s]
        self._rest_s = [np.max(fastest[index:], axis=0) for index in range(len(fastest))]
        self._descend((), np.zeros_like(fastest[0]))

    def _must_stop(self) -> bool:
        """Calls `should_stop` once a plan is known, until it returns True."""
        self.stopped = self.stopped or (bool(self.best) and self.should_stop())
        return self.stopped

    def _fastest_s(self, sets: Sequence[tuple[str, ...]]) -> float:
        """Returns a lower bound on the time of every plan of these pools, from each model's times alone."""
        fastest = [np.sum([self.table.fastest_s(self.number_of[role]) for role in roles], axis=0) for roles in sets]
        return float(np.max(fastest, axis=0).sum())

    def _descend(self, chosen: tuple[PoolOption, ...], slowest_s: NDArray[np.float64]) -> None:
        index = len(chosen)
        if index == len(self._sets):
            self._keep(chosen)
            return
        slower_s = np.maximum(self._stage_s[index], slowest_s)
        rest_s = self._rest_s[index + 1] if index + 1 < len(self._sets) else 0.0
        least_s = np.maximum(slower_s, rest_s).sum(axis=1)
        for number in np.flatnonzero(least_s <= self.best_key[0] * (1 + _TIE)):
            if self._must_stop():
                self._open_s = min(self._open_s, float(least_s[number:].min()))
                return
            option = self._options[index][number]
            if self._bound(float(least_s[number]), (*chosen, option)) >= self.best_key:
                continue
            if fits(self.table.cluster, [*self._requests(chosen), option.request]):
                self._descend((*chosen, option), slower_s[number])

    def _bound(self, least_s: float, chosen: tuple[PoolOption, ...]) -> tuple[float, int, int]:
        """A key that no completion of `chosen` in `least_s` or more can undercut: its cost, pools and devices."""
        devices = sum(request.num_gpus for request in self._requests(chosen)) + len(self._sets) - len(chosen)
        return _rounded(least_s), len(self._sets), devices

    def _keep(self, chosen: tuple[PoolOption, ...]) -> None:
        self.placements_tried += 1
        requests = list(self._requests(chosen))
        slots = pack(self.table.cluster, requests)
        assert slots is not None, "the last step of the descent packed these requests"
        cost = compute_cost([option.stage_s for option in chosen])
        key = (_rounded(cost), len(chosen), sum(request.num_gpus for request in requests))
        if key < self.best_key:
            self.best_key = key
            self.best = tuple(
                PoolPlacement(roles=roles, option=option, slots=places)
                for roles, option, places in zip(self._sets, chosen, slots, strict=True)
            )

    @staticmethod
    def _requests(chosen: Sequence[PoolOption]) -> Iterator[PoolRequest]:
        return (option.request for option in chosen)
