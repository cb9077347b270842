"""The search on the random problems of its oracle: feasibility, early stops and the order of roles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType

import pytest

from hf_mapper import is_feasible, map_dataflow
from hf_mapper.search import pools
from hf_protocols import MappingPlan

Solved = Callable[[int], MappingPlan | None]


@pytest.mark.parametrize("often", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_feasibility_agrees_with_the_search(often: bool, oracle: ModuleType, solved: Solved) -> None:
    """On the problems that the oracle solves in this lane, four of eight, and a fifth with two models offloaded."""
    seeds = [seed for seed in range(oracle.NUM_PROBLEMS) if (seed % 8 in (0, 2, 4, 6, 7)) == often]
    answers = []
    for seed in seeds:
        problem = oracle.draw_problem(seed)
        plan = solved(seed)
        assert is_feasible(*problem[:4], backends=problem.backends) == (plan is not None), seed
        answers.append((plan, problem))
    plans = [(plan, problem) for plan, problem in answers if plan is not None]
    assert 0.2 * len(seeds) < len(plans) < 0.95 * len(seeds)
    layouts = [model for plan, _ in plans for model in plan.models.values() if model.train is not None]
    counts = [len(plan.pools) - sum(model.train is None for model in plan.models.values()) for plan, _ in plans]
    assert {1, 2, 3} <= set(counts)
    assert any(model.train.tp_size > 1 for model in layouts)
    assert any(model.train.pp_size > 1 for model in layouts)
    assert any(model.train.dp_size > 1 for model in layouts)
    assert any(plan.estimates.idle_gpus for plan, _ in plans)
    offloaded = [sum(model.offload for model in plan.models.values()) for plan, _ in plans]
    assert {0, 1, 2} <= set(offloaded)
    assert any(
        len({machine.gpu_kind for pool in plan.pools for machine in pool.machines} - {"cpu"}) > 1 for plan, _ in plans
    )


@pytest.mark.parametrize("part", range(4))
def test_a_gap_is_never_understated(
    part: int, oracle: ModuleType, solved: Solved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped anywhere: the optimum is not below `iteration_s * (1 - gap)`, and nothing is simulated any more."""
    built: list[int] = []
    simulate_options = pools.simulate_options
    monkeypatch.setattr(pools, "simulate_options", lambda *given: built.append(1) or simulate_options(*given))
    gaps = []
    for seed in range(part, oracle.NUM_PROBLEMS, 24):
        problem = oracle.draw_problem(seed)
        best = solved(seed)
        if best is None:
            continue
        least_s = best.estimates.iteration_s
        for limit in (1, 2, 5, 20, 100):
            asked: list[int] = []

            def stop(asked: list[int] = asked, limit: int = limit) -> bool:
                asked.append(len(built))
                return len(asked) == limit

            found = map_dataflow(*problem[:4], stop, backends=problem.backends).estimates
            search, reached_s = found.search, found.iteration_s
            assert search.complete == (len(asked) < limit), seed
            if search.complete:
                assert (search.gap, reached_s) == (0, pytest.approx(least_s, rel=1e-8)), seed
                continue
            assert len(asked) == limit, "a sign that was given is not asked for again"
            assert len(built) == asked[-1], "the stop is at once"
            assert 0 <= search.gap < 1
            assert reached_s * (1 - search.gap) <= least_s * (1 + 1e-9) <= reached_s * (1 + 2e-8), seed
            gaps.append(search.gap)
    assert min(gaps) < 0.05 < max(gaps), "bounds are tight for some and loose for others"


def test_roles_in_another_order_cost_the_same(oracle: ModuleType, solved: Solved) -> None:
    for seed in range(0, oracle.NUM_PROBLEMS, 6):
        problem = oracle.draw_problem(seed)
        plan = solved(seed)
        calls = problem.dataflow.calls
        reversed_stages = [call for stage in problem.dataflow.stages() for call in reversed(stage)]
        turned = problem._replace(dataflow=dataclasses.replace(problem.dataflow, calls=tuple(reversed_stages)))
        other = oracle.solve(turned)
        assert len(calls) == len(reversed_stages)
        if plan is not None:
            assert other is not None
            assert other.estimates.iteration_s == pytest.approx(plan.estimates.iteration_s, rel=1e-8)
