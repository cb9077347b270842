"""Factors on the models' bytes against brute force: on clusters with as much less or more memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from hf_mapper import MapperConfig, explain_plan
from hf_mapper.explain.memory_tolerance import compute_memory_tolerance
from hf_mapper.explain.robustness import MOST_FACTOR
from hf_mapper.search.exact_search import find_pools
from hf_protocols import PlanError


@pytest.fixture
def build(paper_problem: Callable[..., Any]) -> Callable[..., MapperConfig]:
    return lambda *given: MapperConfig(**paper_problem(*given)._asdict())


def best_s(oracle: ModuleType, problem: Any, factor: float) -> float | None:
    """Seconds of the best of all placements where 1 / `factor` of the memory is there."""
    machines = tuple(
        dataclasses.replace(
            machine,
            gpu=dataclasses.replace(machine.gpu, memory_bytes=round(machine.gpu.memory_bytes / factor)),
            host_memory_bytes=round(machine.host_memory_bytes / factor),
        )
        for machine in problem.cluster.machines
    )
    found = oracle.brute_force(problem._replace(cluster=dataclasses.replace(problem.cluster, machines=machines)))
    return None if found is None else found[0]


def test_ends_are_where_brute_force_has_them(oracle: ModuleType) -> None:
    seen = {"winner": 0, "none": 0, "lost": 0}
    for seed in (17, 20, 23, 26, 46, 50, 52):
        problem = oracle.draw_problem(seed)
        given = MapperConfig(**problem._asdict())
        try:
            plan, pools = find_pools(given)
        except PlanError:
            continue
        ends, plan_s = compute_memory_tolerance(given, pools, lambda: False), plan.estimates.iteration_s
        assert ends is not None
        assert ends.optimal_from <= 1 <= ends.optimal_to
        for inside in (ends.optimal_from * (1 + 1e-5), (1 + ends.optimal_to) / 2, ends.optimal_to * (1 - 1e-5)):
            assert best_s(oracle, problem, inside) == pytest.approx(plan_s, rel=1e-8), (seed, ends)
        if ends.winner_below:
            faster_s = best_s(oracle, problem, ends.optimal_from * (1 - 1e-5))
            assert faster_s is not None
            assert faster_s < plan_s * (1 - 1e-9), (seed, ends)
        else:
            assert ends.optimal_from == 1 / MOST_FACTOR
        seen["winner" if ends.winner_below else "none"] += 1
        # Beyond the other end the plan does not fit: what is best there is slower, another plan of equal time, or none.
        slower_s = best_s(oracle, problem, ends.optimal_to * (1 + 1e-5))
        assert slower_s is None or slower_s >= plan_s * (1 - 1e-8), (seed, ends)
        seen["lost"] += slower_s is None or slower_s > plan_s * (1 + 1e-8)
    assert all(seen.values()), seen


def test_the_fullest_pool_bounds_how_much_more_may_be_needed(build: Callable[..., MapperConfig]) -> None:
    problem = build("ppo", "llama-2-7b", 16)
    plan, pools = find_pools(problem)
    found = compute_memory_tolerance(problem, pools, lambda: False)
    assert found is not None
    fullest = max(pool.memory_bytes / pool.usable_bytes for pool in plan.estimates.pools.values())
    assert found.optimal_to == pytest.approx(1 / fullest)
    assert found.largest_error == min(found.optimal_to - 1, 1 - found.optimal_from)


def test_left_out_or_stopped_it_gives_no_tolerance(build: Callable[..., MapperConfig]) -> None:
    problem = build("grpo", "llama-2-7b", 16)
    assert explain_plan(problem, robustness=False).memory is None
    assert explain_plan(problem, lambda: True).memory is None
