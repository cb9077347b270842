"""Trade-offs between the stages of a set of models on n devices of one kind that fit in memory.

Models of one pool run one after another, so their times in a stage add. Their states stay side by side, and one call
at a time adds its work. Offloaded states stay side by side in the device's part of host memory. An iteration is a sum
over stages of a maximum over pools, which never grows when a pool's time in a stage shrinks. So of a set's combinations
only those matter that no other one undercuts in every stage: the frontier. Frontiers of single models carry memory as
three more coordinates, which makes one of them serve every budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hf_mapper.config import MapperConfig
from hf_mapper.search.demand import ModelDemand, number_demands
from hf_mapper.search.frontier import find_frontier
from hf_mapper.search.parallelism import (
    ModelOption,
    SimulatedOptions,
    choose_backends,
    find_device_counts,
    simulate_options,
)
from hf_mapper.search.placements import PoolRequest
from hf_mapper.search.scales import SimulatorScales
from hf_mapper.specs import ClusterSpec, WorkloadSpec

__all__ = ["PoolOption", "PoolTable", "build_table"]

Members = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PoolOption:
    """A set of models on a pool: one `ModelOption` per member, seconds per stage, bytes per device."""

    request: PoolRequest
    members: tuple[ModelOption, ...]
    stage_s: tuple[float, ...]
    memory_bytes: float


@dataclass(frozen=True)
class _Combinations:
    """Rows of stage seconds, host bytes, state bytes and work bytes; with the index of each member's option."""

    values: NDArray[np.float64]
    chosen: NDArray[np.intp]


@dataclass(kw_only=True)
class PoolTable:
    """Memoised options of the models and of the sets of models that occur.

    Models go by their number in `demands`, sets by the sorted tuple of these: equal models are computed once.
    Demands with many options stand last: what a set's last model adds needs no frontier over memory.
    """

    demands: Sequence[ModelDemand]
    cluster: ClusterSpec
    workload: WorkloadSpec
    backends: Sequence[str] | Mapping[str, Sequence[str]] | None = None
    scales: SimulatorScales = field(default_factory=SimulatorScales)
    _simulated: dict[tuple[int, PoolRequest], SimulatedOptions] = field(default_factory=dict)
    _counts: dict[tuple[Members, int], list[int]] = field(default_factory=dict)
    _options: dict[tuple[int, PoolRequest], tuple[ModelOption, ...]] = field(default_factory=dict)
    _combinations: dict[tuple[Members, PoolRequest], _Combinations] = field(default_factory=dict)
    _pools: dict[Members, tuple[PoolOption, ...]] = field(default_factory=dict)
    _fastest_s: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    def options(self, demand: int, request: PoolRequest) -> tuple[ModelOption, ...]:
        """The ways to run one model on a pool of its own that matter: no other has less time and less memory."""
        key = (demand, request)
        if key not in self._options:
            simulated = self._simulate(demand, request)
            stage_s = simulated.stage_s(self.scales)
            rows = np.column_stack((stage_s, simulated.memory_bytes))
            usable = self.cluster.machines[request.machine].gpu.usable_bytes
            fitting = np.flatnonzero(rows[:, -2] + rows[:, -1] <= usable)
            self._options[key] = tuple(
                replace(simulated.ways[row], stage_s=tuple(stage_s[row].tolist()))
                for row in fitting[find_frontier(rows[fitting])]
            )
        return self._options[key]

    def device_counts(self, members: Members, kind: int) -> list[int]:
        """Ascending numbers of devices of `cluster.machines[kind]` on which every member could have a layout."""
        key = (members, kind)
        if key not in self._counts:
            machine = self.cluster.machines[kind]
            counts = [find_device_counts(self.demands[member], machine, self.workload) for member in set(members)]
            self._counts[key] = sorted(frozenset.intersection(*counts))
        return self._counts[key]

    def rescaled(self, scales: SimulatorScales) -> PoolTable:
        """Returns a table of other factors that shares what was simulated, also what either simulates later."""
        return replace(self, scales=scales, _options={}, _combinations={}, _pools={}, _fastest_s={})

    def _simulate(self, demand: int, request: PoolRequest) -> SimulatedOptions:
        key = (demand, request)
        if key not in self._simulated:
            cluster = self.cluster.only(request.machine)
            backends = choose_backends(self.demands[demand], cluster.machine.gpu.kind, self.backends)
            self._simulated[key] = simulate_options(
                self.demands[demand], cluster, request.num_gpus, self.workload, backends
            )
        return self._simulated[key]

    def pool_options(self, members: Members) -> tuple[PoolOption, ...]:
        """The ways to run a set of models on any pool that matter: no other is as fast everywhere on as few devices.

        In order of the sum over stages.
        """
        if members not in self._pools:
            found: list[PoolOption] = []
            for kind in range(len(self.cluster.machines)):
                of_kind = [
                    option
                    for count in self.device_counts(members, kind)
                    for option in self._on(members, PoolRequest(machine=kind, num_gpus=count))
                ]
                if of_kind:
                    points = np.array([(*option.stage_s, option.request.num_gpus) for option in of_kind])
                    found += [of_kind[row] for row in find_frontier(points)]
            self._pools[members] = tuple(sorted(found, key=lambda option: sum(option.stage_s)))
        return self._pools[members]

    def fastest_s(self, demand: int) -> NDArray[np.float64]:
        """Seconds per stage `[stages]` that one model undercuts on no pool; infinite where it fits on none."""
        if demand not in self._fastest_s:
            rows = [option.stage_s for option in self.pool_options((demand,))]
            never = [[np.inf] * len(self.demands[demand].calls)]
            self._fastest_s[demand] = np.min(rows or never, axis=0)
        return self._fastest_s[demand]

    def _on(self, members: Members, request: PoolRequest) -> list[PoolOption]:
        combined = self._join(members, request)
        stages, memory = combined.values[:, :-3], combined.values[:, -2:].sum(axis=1)
        return [
            PoolOption(
                request=request,
                members=tuple(
                    self.options(demand, request)[index]
                    for demand, index in zip(members, combined.chosen[row], strict=True)
                ),
                stage_s=tuple(float(seconds) for seconds in stages[row]),
                memory_bytes=float(memory[row]),
            )
            for row in find_frontier(stages)
        ]

    def _combine(self, members: Members, request: PoolRequest) -> _Combinations:
        """Returns the combinations of `_join` that no other combination beats in both time and memory."""
        key = (members, request)
        if key not in self._combinations:
            joined = self._join(members, request)
            kept = find_frontier(joined.values)
            self._combinations[key] = _Combinations(joined.values[kept], joined.chosen[kept])
        return self._combinations[key]

    def _join(self, members: Members, request: PoolRequest) -> _Combinations:
        """The combinations of all members but the last, with every option of the last, where memory allows."""
        *front, last = members
        rows = self._rows(self.options(last, request))
        if not front:
            return _Combinations(rows, np.arange(len(rows))[:, None])
        before = self._combine(tuple(front), request)
        left, right = (index.ravel() for index in np.indices((len(before.values), len(rows))))
        values = before.values[left] + rows[right]
        values[:, -1] = np.maximum(before.values[left, -1], rows[right, -1])
        machine = self.cluster.machines[request.machine]
        fits = (values[:, -2] + values[:, -1] <= machine.gpu.usable_bytes) & (values[:, -3] <= machine.offload_bytes)
        return _Combinations(values[fits], np.column_stack((before.chosen[left], right))[fits])

    def _rows(self, options: Sequence[ModelOption]) -> NDArray[np.float64]:
        """Seconds per stage, host, state and work bytes of each option: `[M, stages + 3]`."""
        rows = [(*option.stage_s, option.host_bytes, option.state_bytes, option.work_bytes) for option in options]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self.demands[0].calls) + 3)


def build_table(problem: MapperConfig, demands: Mapping[str, ModelDemand]) -> PoolTable:
    """The empty table of a problem whose roles have `demands`."""
    return PoolTable(
        demands=number_demands(demands.values()),
        cluster=problem.cluster,
        workload=problem.workload,
        backends=problem.backends,
    )
