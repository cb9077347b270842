"""How wrong a simulator may be before another plan is better: the question that the paper leaves open.

A plan's time is a sum over stages of maxima over pools, each linear in the factor on one simulator's answers. So for
any rival the factor at which it overtakes is found to machine precision without a search; a search at that factor then
either finds a rival that overtakes earlier, or proves that none is better there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_mapper.config import MapperConfig
from hf_mapper.demand import ModelDemand, build_demands, number_demands
from hf_mapper.placements import set_partitions
from hf_mapper.planning import PlacedPool
from hf_mapper.pools import PoolTable
from hf_mapper.pricing import Seconds, price_pools, total_seconds
from hf_mapper.scales import SIMULATORS, SimulatorScales
from hf_mapper.search import search_partitions

__all__ = ["MOST_FACTOR", "Tolerance", "compute_tolerances"]

MOST_FACTOR = 4.0
"""Factors from its inverse to this one are tried."""

_PROBES = (1.05, 1.25, 2.0, MOST_FACTOR)
_WRONG_BY = 1.25
_TIE = 1e-8
"""Relative difference below which two plans are equally fast, as in the search."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Factors on one simulator's seconds, the others being right, between which the plan stays optimal.

    ``optimal_from`` and ``optimal_to`` are ``1 / MOST_FACTOR`` and ``MOST_FACTOR`` where no search found a better
    plan.
    ``loss_if_faster`` and ``loss_if_slower``: the plan's time over the best plan's, less 1, should all calls of the
    kind take 1/1.25 or 1.25 times what was predicted. ``winner_below`` and ``winner_above`` are the roles of the pools
    of the plan that takes over there (the same pools in other layouts, perhaps), empty where none does.
    """

    simulator: str
    optimal_from: float
    optimal_to: float
    loss_if_faster: float
    loss_if_slower: float
    winner_below: tuple[tuple[str, ...], ...]
    winner_above: tuple[tuple[str, ...], ...]

    @property
    def largest_error(self) -> float:
        """The largest relative error, either way, under which the plan stays optimal."""
        return min(self.optimal_to - 1.0, 1.0 - self.optimal_from)


@dataclass(frozen=True, kw_only=True)
class _Rival:
    pools: tuple[PlacedPool, ...]
    seconds: Seconds


def compute_tolerances(problem: MapperConfig, pools: Sequence[PlacedPool]) -> tuple[Tolerance, ...]:
    """The tolerance of every simulator that the plan ``pools`` of ``problem`` calls at all.

    Searches at factors of 1.05, 1.25, 2 and 4 either way, and from the first at which another plan wins back to where
    that begins. A plan that wins between two of these factors only, and at neither, is not seen.
    """
    demands = build_demands(problem.dataflow, problem.models, problem.workload)
    seconds = price_pools(pools, demands, problem.cluster, problem.workload)
    chosen = _Rival(pools=tuple(pools), seconds=seconds)
    return tuple(_measure(problem, demands, chosen, name) for name in SIMULATORS if seconds[name].any())


def _measure(problem: MapperConfig, demands: Mapping[str, ModelDemand], chosen: _Rival, simulator: str) -> Tolerance:
    found: dict[float, _Rival] = {}

    def best_at(factor: float) -> _Rival:
        if factor not in found:
            found[factor] = _search(problem, demands, SimulatorScales(**{simulator: factor}))
        return found[factor]

    def cost(rival: _Rival, factor: float) -> float:
        return total_seconds(rival.seconds, SimulatorScales(**{simulator: factor}))

    def loss(factor: float) -> float:
        return max(0.0, cost(chosen, factor) / cost(best_at(factor), factor) - 1)

    below, winner_below = _find_end(chosen, best_at, cost, [1 / probe for probe in _PROBES])
    above, winner_above = _find_end(chosen, best_at, cost, list(_PROBES))
    return Tolerance(
        simulator=simulator,
        optimal_from=below,
        optimal_to=above,
        loss_if_faster=loss(1 / _WRONG_BY),
        loss_if_slower=loss(_WRONG_BY),
        winner_below=_list_pools(problem, winner_below),
        winner_above=_list_pools(problem, winner_above),
    )


def _find_end(
    chosen: _Rival,
    best_at: Callable[[float], _Rival],
    cost: Callable[[_Rival, float], float],
    probes: Sequence[float],
) -> tuple[float, _Rival | None]:
    """The factor nearest to 1, in the direction of ``probes``, beyond which another plan is better; and that plan."""

    def beaten(rival: _Rival, factor: float) -> bool:
        return cost(rival, factor) < cost(chosen, factor) * (1 - _TIE)

    factor = next((probe for probe in probes if beaten(best_at(probe), probe)), None)
    if factor is None:
        return probes[-1], None
    rival = best_at(factor)
    while True:
        factor = _cross(lambda at, by=rival: beaten(by, at), 1.0, factor)  # type: ignore[misc]
        earlier = best_at(factor)
        if not beaten(earlier, factor):
            return factor, rival
        rival = earlier


def _list_pools(problem: MapperConfig, rival: _Rival | None) -> tuple[tuple[str, ...], ...]:
    """The roles of each pool, in the dataflow's order."""
    order = {role: number for number, role in enumerate(problem.dataflow.roles)}
    pools = [tuple(sorted(pool.roles, key=order.__getitem__)) for pool in rival.pools] if rival else []
    return tuple(sorted(pools, key=lambda roles: order[roles[0]]))


def _cross(beaten: Callable[[float], bool], kept: float, lost: float) -> float:
    """A factor at which the plan still stands, next to one at which it is beaten."""
    while abs(lost - kept) > 1e-10:
        middle = (kept + lost) / 2
        kept, lost = (kept, middle) if beaten(middle) else (middle, lost)
    return kept


def _search(problem: MapperConfig, demands: Mapping[str, ModelDemand], scales: SimulatorScales) -> _Rival:
    table = PoolTable(
        demands=number_demands(demands.values()),
        cluster=problem.cluster,
        workload=problem.workload,
        backends=problem.backends,
        scales=scales,
    )
    pools, _ = search_partitions(table, demands, set_partitions(tuple(demands)))
    return _Rival(pools=pools, seconds=price_pools(pools, demands, problem.cluster, problem.workload))
