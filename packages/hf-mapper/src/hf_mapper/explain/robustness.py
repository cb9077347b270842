"""Error factors of each simulator within which a plan stays optimal: the question that the paper leaves open.

A plan's time is a sum over stages of maxima over pools, each linear in the factor on one simulator's answers. So for
any rival the factor at which it overtakes is found to machine precision without a search. A search at that factor then
either finds a rival that overtakes earlier, or proves that none is better there.

Between two factors at which the plan is the best, no rival is better by more than a known part. The reason is that
every plan's time grows with the factor, and relatively no faster than the factor. So searches are placed as far apart
as possible, such that a rival that wins only between two of them, and is missed, gains no more than `RESOLUTION`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_mapper.config import MapperConfig
from hf_mapper.explain.pricing import Seconds, price_pools, total_seconds
from hf_mapper.search.demand import ModelDemand, build_demands
from hf_mapper.search.exact_search import StopSign, search_partitions
from hf_mapper.search.placements import set_partitions
from hf_mapper.search.planning import PoolPlacement
from hf_mapper.search.pools import PoolTable, build_table
from hf_mapper.search.scales import SIMULATORS, SimulatorScales

__all__ = ["MOST_FACTOR", "RESOLUTION", "Tolerance", "compute_tolerances", "list_pools"]

MOST_FACTOR = 4.0
"""Factors from its inverse to this one are tried."""

RESOLUTION = 0.01
"""Largest part of the plan's time by which an unseen plan may beat it between the ends that are found."""

_WRONG_BY = 1.25
_TIE = 1e-8
"""Relative difference below which two plans are equally fast, as in the search."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Factors on one simulator's seconds, the others being right, between which the plan stays optimal.

    Between these factors no plan is better by more than `RESOLUTION`, and at the ends no plan is better at all.
    `optimal_from` and `optimal_to` are `1 / MOST_FACTOR` and `MOST_FACTOR` if no search found a better plan.

    `loss_if_faster` and `loss_if_slower` are the plan's time divided by the best plan's, less 1, if all calls of the
    kind take 1/1.25 or 1.25 times their predicted time. `winner_below` and `winner_above` are the roles of the pools of
    the plan that takes over at the ends (perhaps the same pools in other layouts); they are empty if no plan does.
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
    pools: tuple[PoolPlacement, ...]
    seconds: Seconds


def compute_tolerances(
    problem: MapperConfig, pools: Sequence[PoolPlacement], should_stop: StopSign
) -> tuple[Tolerance, ...]:
    """The tolerance of every simulator that the plan `pools` of `problem` calls at all.

    Only of simulators that were finished when `should_stop` returns True.
    """
    demands = build_demands(problem.dataflow, problem.models, problem.workload, problem.backends)
    seconds = price_pools(pools, demands, problem.cluster, problem.workload)
    chosen = _Rival(pools=tuple(pools), seconds=seconds)
    table = build_table(problem, demands)
    found: list[Tolerance] = []
    for name in (name for name in SIMULATORS if seconds[name].any()):
        try:
            found.append(_measure(problem, table, demands, chosen, name, should_stop))
        except _StoppedError:
            break
    return tuple(found)


def _measure(
    problem: MapperConfig,
    table: PoolTable,
    demands: Mapping[str, ModelDemand],
    chosen: _Rival,
    simulator: str,
    should_stop: StopSign,
) -> Tolerance:
    found = {1.0: chosen}

    def best_at(factor: float) -> _Rival:
        if factor not in found:
            found[factor] = _search(table.rescaled(SimulatorScales(**{simulator: factor})), demands, should_stop)
        return found[factor]

    def cost(rival: _Rival, factor: float) -> float:
        return total_seconds(rival.seconds, SimulatorScales(**{simulator: factor}))

    def loss(factor: float) -> float:
        return max(0.0, cost(chosen, factor) / cost(best_at(factor), factor) - 1)

    below, winner_below = _find_end(chosen, best_at, cost, 1 / MOST_FACTOR)
    above, winner_above = _find_end(chosen, best_at, cost, MOST_FACTOR)
    return Tolerance(
        simulator=simulator,
        optimal_from=below,
        optimal_to=above,
        loss_if_faster=loss(1 / _WRONG_BY),
        loss_if_slower=loss(_WRONG_BY),
        winner_below=list_pools(problem, winner_below.pools if winner_below else ()),
        winner_above=list_pools(problem, winner_above.pools if winner_above else ()),
    )


def _find_end(
    chosen: _Rival,
    best_at: Callable[[float], _Rival],
    cost: Callable[[_Rival, float], float],
    last: float,
) -> tuple[float, _Rival | None]:
    """The factor nearest to 1 on the way to `last` beyond which another plan is better; and that plan."""

    def beaten(rival: _Rival, factor: float) -> bool:
        return cost(rival, factor) < cost(chosen, factor) * (1 - _TIE)

    kept = factor = 1.0
    while not beaten(best_at(factor), factor):
        if factor == last:
            return last, None
        kept, factor = factor, _step(lambda at: cost(chosen, at), factor, last)
    rival = best_at(factor)
    while True:
        factor = _cross(lambda at, by=rival: beaten(by, at), kept, factor)  # type: ignore[misc]
        earlier = best_at(factor)
        if not beaten(earlier, factor):
            return factor, rival
        rival = earlier


def list_pools(problem: MapperConfig, placed: Sequence[PoolPlacement]) -> tuple[tuple[str, ...], ...]:
    """The roles of each pool, in the dataflow's order."""
    order = {role: number for number, role in enumerate(problem.dataflow.roles)}
    pools = [tuple(sorted(pool.roles, key=order.__getitem__)) for pool in placed]
    return tuple(sorted(pools, key=lambda roles: order[roles[0]]))


def _cross(beaten: Callable[[float], bool], kept: float, lost: float) -> float:
    """A factor at which the plan still stands, next to one at which it is beaten."""
    while abs(lost - kept) > 1e-10:
        middle = (kept + lost) / 2
        kept, lost = (kept, middle) if beaten(middle) else (middle, lost)
    return kept


def _step(cost: Callable[[float], float], start: float, last: float) -> float:
    """The farthest factor from `start` to `last` with nothing on the way that could gain over `RESOLUTION`."""

    def too_far(factor: float) -> bool:
        return _unseen_gain(cost, *sorted((start, factor))) > RESOLUTION

    return _cross(too_far, start, last) if too_far(last) else last


def _unseen_gain(cost: Callable[[float], float], low: float, high: float) -> float:
    """The largest part by which a plan may beat the one with `cost`, the best at `low` and `high`, between them.

    The best plan's time at a factor f is at least `cost(low)`, and at least `cost(high) * f / high`. Both bounds
    meet where the gain can be largest, as `cost` grows on the one side and `cost(f) / f` falls on the other.
    """
    meet = high * cost(low) / cost(high)
    return cost(meet) / cost(low) - 1


class _StoppedError(Exception):
    """A search was stopped before it knew the best plan."""


def _search(table: PoolTable, demands: Mapping[str, ModelDemand], should_stop: StopSign) -> _Rival:
    if should_stop():
        raise _StoppedError
    pools, search = search_partitions(table, demands, set_partitions(tuple(demands)), should_stop)
    if not search.complete:
        raise _StoppedError
    return _Rival(pools=pools, seconds=price_pools(pools, demands, table.cluster, table.workload))
