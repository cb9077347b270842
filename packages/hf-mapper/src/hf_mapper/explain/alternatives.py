"""The best plan of every placement class, and the reason that it loses against the chosen plan.

A class that does not fit says how much memory is missing, and to which call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hf_mapper.config import MapperConfig
from hf_mapper.search.demand import ModelDemand, build_demands
from hf_mapper.search.exact_search import StopSign, compute_cost, search_partitions
from hf_mapper.search.placements import set_partitions
from hf_mapper.search.planning import PoolPlacement
from hf_mapper.search.pools import build_table
from hf_mapper.search.shortfall import count_devices, find_shortfall

__all__ = ["Alternative", "compare_classes"]


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
        return None, f"{len(partition)} pools find no place among {count_devices(problem.cluster.num_gpus)}"
    return short.missing_bytes, f"out of memory by {short.describe()}"


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
