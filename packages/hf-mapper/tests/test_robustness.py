"""Tolerances against brute force: at factors around the ends found, every placement is priced again."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hf_mapper import MapperConfig, Tolerance, explain_plan
from hf_mapper.explain import robustness
from hf_mapper.explain.robustness import MOST_FACTOR, RESOLUTION
from hf_mapper.search.scales import SIMULATORS, SimulatorScales
from hf_protocols import ConfigError, PlanError

# Some of the problems in every run, the others where tests may take minutes.
OFTEN = range(0, 60, 10)
PROBLEMS = [
    pytest.param(OFTEN, id="some"),
    pytest.param(sorted({*range(0, 60, 2)} - {*OFTEN}), id="the others", marks=pytest.mark.slow),
]
SIMULATED = {"training": "simulate_training", "inference": "simulate_inference", "generation": "simulate_generation"}
MOVED = {"transfer": "fetch_s", "offload": "swap_s"}


@pytest.fixture
def oracle() -> ModuleType:
    path = Path(__file__).with_name("test_search_oracle.py")
    spec = importlib.util.spec_from_file_location("search_oracle", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("estimate_memory", *SIMULATED.values()):
        setattr(module, name, remembered(getattr(module, name)))
    vars(module)["plain"] = {name: getattr(module, name) for name in (*SIMULATED.values(), *MOVED.values())}
    return module


def remembered(simulate: Any) -> Any:
    """`simulate` with its answers kept: every factor prices the same layouts."""
    answers: dict[Any, Any] = {}

    def recall(*given: Any, **options: Any) -> Any:
        key = (given, *((name, str(value)) for name, value in sorted(options.items())))
        if key not in answers:
            answers[key] = simulate(*given, **options)
        return answers[key]

    return recall


def scale(oracle: ModuleType, monkeypatch: pytest.MonkeyPatch, simulator: str, factor: float) -> None:
    """Let the oracle price with answers of `simulator` that are `factor` times too long."""
    plain = vars(oracle)["plain"]
    for name, function in plain.items():
        monkeypatch.setattr(oracle, name, function)
    if simulator in MOVED:
        monkeypatch.setattr(oracle, MOVED[simulator], lambda *given: factor * plain[MOVED[simulator]](*given))
        return
    name = SIMULATED.get(simulator, "simulate_generation")

    def scaled(*arguments: Any, **options: Any) -> Any:
        answer = plain[name](*arguments, **options)
        if simulator in ("training", "inference"):
            return type(answer)(latency_s=factor * answer.latency_s, memory_bytes=answer.memory_bytes)
        touched = ("transition_s",) if simulator == "transition" else ("prefill_s", "decode_s")
        parts = {part: value * (factor if part in touched else 1) for part, value in answer.breakdown.items()}
        return type(answer)(latency_s=sum(parts.values()), memory_bytes=answer.memory_bytes, breakdown=parts)

    monkeypatch.setattr(oracle, name, scaled)


def gap(oracle: ModuleType, problem: Any, plan: Any) -> float:
    """By how much the plan is slower than the best of all, as a part, at the oracle's present factors."""
    best = oracle.brute_force(problem)
    assert best is not None
    return float(oracle.describe(plan, problem)[0] / best[0] - 1)


@pytest.mark.parametrize("seeds", PROBLEMS)
def test_ends_are_where_brute_force_has_them(
    seeds: Sequence[int], oracle: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, chance = {"kept": 0, "lost": 0}, random.Random(len(seeds))
    for seed in seeds:
        problem = oracle.draw_problem(seed)
        try:
            found = explain_plan(MapperConfig(**problem._asdict()))
        except PlanError:
            continue
        for tolerance in found.tolerances:
            for end, winner in (
                (tolerance.optimal_from, tolerance.winner_below),
                (tolerance.optimal_to, tolerance.winner_above),
            ):
                for inside in (end + (1 - end) / 1000, (end + 1) / 2):
                    scale(oracle, monkeypatch, tolerance.simulator, inside)
                    assert gap(oracle, problem, found.plan) < 1e-8, (seed, tolerance)
                    checked["kept"] += 1
                if winner:
                    beyond = end - (1 - end) * 1e-2 if abs(end - 1) > 1e-6 else end * (1.001 if end >= 1 else 0.999)
                    scale(oracle, monkeypatch, tolerance.simulator, beyond)
                    assert gap(oracle, problem, found.plan) > 0, (seed, tolerance)
                    checked["lost"] += 1
            scale(
                oracle, monkeypatch, tolerance.simulator, chance.uniform(tolerance.optimal_from, tolerance.optimal_to)
            )
            assert gap(oracle, problem, found.plan) <= RESOLUTION + 1e-8, (seed, tolerance)
            for factor, loss in ((1 / 1.25, tolerance.loss_if_faster), (1.25, tolerance.loss_if_slower)):
                scale(oracle, monkeypatch, tolerance.simulator, factor)
                assert gap(oracle, problem, found.plan) == pytest.approx(loss, abs=1e-8), (seed, tolerance)
    assert all(checked.values()), "these problems never showed one of the two"


def total(seconds: np.ndarray, factor: float) -> float:
    """Seconds of a plan: `seconds` `[2, pools, stages]`, other simulators' and, times `factor`, one's."""
    return float((seconds[0] + factor * seconds[1]).max(axis=0).sum())


def test_what_is_not_seen_gains_no_more_than_is_said() -> None:
    """Thousands of plans at random: where one is the best at two factors, by how much any other is better between."""
    chance = np.random.default_rng(0)
    gains = []
    for _ in range(3000):
        plans = [chance.random((2, chance.integers(1, 4), 3)) ** 4 for _ in range(6)]
        low, high = sorted(chance.uniform(0.25, 4.0, size=2))
        best = min(plans, key=lambda plan: total(plan, low))
        if total(best, high) > min(total(plan, high) for plan in plans):
            continue
        bound = robustness._unseen_gain(lambda factor, best=best: total(best, factor), low, high)
        for factor in np.linspace(low, high, 30):
            gain = total(best, factor) / min(total(plan, factor) for plan in plans) - 1
            assert gain <= bound + 1e-12
            gains.append(gain)
    assert max(gains) > 0, "no rival ever won between"


def test_a_rival_that_wins_on_a_short_way_only_is_seen() -> None:
    """It is 3 % slower at 1 and at 1.25, and 2 % faster between; a search at 1.05 and at 1.25 would miss it."""
    chosen = robustness._Rival(pools=(), seconds=split(np.array([[[0.5]], [[0.5]]])))
    rival = robustness._Rival(pools=(), seconds=split(np.array([[[1.03], [0.0]], [[0.0], [0.93]]])))

    def cost(plan: Any, factor: float) -> float:
        return robustness.total_seconds(plan.seconds, SimulatorScales(training=factor))

    def best_at(factor: float) -> Any:
        return min((chosen, rival), key=lambda plan: cost(plan, factor))

    assert best_at(1.05) is best_at(1.25) is chosen
    end, winner = robustness._find_end(chosen, best_at, cost, MOST_FACTOR)
    assert winner is rival
    assert end == pytest.approx(1.06)


def split(seconds: np.ndarray) -> dict[str, np.ndarray]:
    """`[2, pools, stages]` as seconds of the simulators: inference and, with a factor on it, training."""
    return {name: np.zeros_like(seconds[0]) for name in SIMULATORS} | {"inference": seconds[0], "training": seconds[1]}


def test_the_largest_error_is_that_of_the_nearer_end() -> None:
    ends = {"winner_below": (), "winner_above": (), "loss_if_faster": 0.0, "loss_if_slower": 0.0}
    tolerance = Tolerance(simulator="training", optimal_from=0.75, optimal_to=1.5, **ends)  # type: ignore[arg-type]
    assert tolerance.largest_error == 0.25


def test_scales_are_positive() -> None:
    for name in SIMULATORS:
        with pytest.raises(ConfigError, match=f"{name}=0 must be above 0"):
            SimulatorScales(**{name: 0})
    assert MOST_FACTOR > 1
