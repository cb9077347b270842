"""Experiments of the learning benchmark, and the marks that their runs must reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from completion_task import build_completion
from constrained_text import COST_LIMIT, SAFE_RLHF_KEYS, build_constrained_text
from learning_tasks import build_addition
from separating_tasks import build_task

__all__ = [
    "ACCURACY",
    "EXPERIMENTS",
    "LAMBDA",
    "SEPARATIONS",
    "Experiment",
    "Separation",
    "end_of",
    "growth_of",
    "mean_of",
    "spread_of",
    "start_of",
]

ACCURACY = "eval/validation/exact_match"
LAMBDA = "constraint/lambda"
WANTED_GAIN = 0.2
WANTED_DISTANCE = 0.02
"""Of the mean cost from its limit, over the last quarter of the iterations."""
LARGEST_SPREAD = 0.15
"""Of lambda, over the last quarter: what has settled moves by less."""
LARGEST_CONTROL_GAIN = 0.05

_BUILDERS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "addition": build_addition,
    "completion": build_completion,
    "constrained": build_constrained_text,
}

Result = Mapping[str, Any]
"""`before`, `after`, `cpu_s`, and `curves`: pairs of iteration and value by metric."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An algorithm on a task.

    Attributes:
        name: of the runs.
        algorithm: the `[algorithm]` section.
        task: `addition`, `constrained`, `completion`, or a task of `separating_tasks`.
        iterations: of the algorithm.
        curves: metrics that are kept.
        changes: keys that differ from the task's, by section.
    """

    name: str
    algorithm: Mapping[str, Any]
    task: str = "addition"
    iterations: int
    curves: tuple[str, ...] = (ACCURACY, "reward/mean")
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def configure(self, data: Path, seed: int, iterations: int | None = None) -> dict[str, Any]:
        """Returns the configuration without `run.output_dir`, as a TOML file would hold it.

        Args:
            data: folder of the rows.
            seed: of the run.
            iterations: in place of the experiment's.
        """
        keys = {"seed": seed, "iterations": iterations or self.iterations}
        build = _BUILDERS.get(self.task, partial(build_task, task=self.task))
        body = build(data, self.algorithm, **keys)
        for section, changed in self.changes.items():
            body[section] = {**body.get(section, {}), **changed}
        return body

    @property
    def measure(self) -> str:
        """The name of the number by which the experiment is judged."""
        return "mean cost" if self.task == "constrained" else "exact match"

    def judge(self, result: Result) -> tuple[float, bool]:
        """Returns the number by which a run is judged, and True if it reaches its mark."""
        if self.task == "constrained":
            cost = end_of(result, "constraint/cost")
            has_settled = spread_of(result, LAMBDA) <= LARGEST_SPREAD
            return cost, abs(cost - COST_LIMIT) <= WANTED_DISTANCE and has_settled
        gain = result["after"] - result["before"]
        is_control = self.name.endswith("_shuffled")
        return result["after"], gain <= LARGEST_CONTROL_GAIN if is_control else gain >= WANTED_GAIN


@dataclass(frozen=True, kw_only=True)
class Separation:
    """A task on which two algorithms, or two settings of one, must differ.

    Attributes:
        task: of the compared experiments.
        title: of the page's table.
        experiments: the first is expected to show an effect that the second does not.
        metric: the curve that shows it.
        rule: for the page, about the numbers that are compared.
        measure: the number of a run by which both are compared.
        passes: takes the means of these numbers over the seeds, in the order of `experiments`.
        pictured: algorithms whose page shows this task's curve.
    """

    task: str
    title: str
    experiments: tuple[Experiment, ...]
    metric: str
    rule: str
    measure: Callable[[Result], float]
    passes: Callable[..., bool]
    pictured: tuple[str, ...] = ()

    def measure_all(self, results: Sequence[Mapping[int, Result]]) -> list[list[float]]:
        """Returns the numbers of each experiment, one for each seed that all experiments have.

        Args:
            results: of each experiment, by seed.
        """
        shared = sorted(set.intersection(*(set(found) for found in results)))
        return [[self.measure(found[seed]) for seed in shared] for found in results]

    def judge(self, results: Sequence[Mapping[int, Result]]) -> bool | None:
        """Returns True if the means over the seeds pass; None without a seed that all experiments have."""
        numbers = self.measure_all(results)
        return self.passes(*(sum(each) / len(each) for each in numbers)) if numbers[0] else None


def _values(result: Result, metric: str) -> list[float]:
    return [value for _, value in result["curves"][metric]]


def start_of(result: Result, metric: str) -> float:
    """Returns the mean over the first five points of a curve."""
    return fmean(_values(result, metric)[:5])


def end_of(result: Result, metric: str) -> float:
    """Returns the mean over the last quarter of a curve."""
    return fmean(_last_quarter(result, metric))


def spread_of(result: Result, metric: str) -> float:
    """Returns the distance of the largest from the smallest value of a curve's last quarter, over their mean."""
    last = _last_quarter(result, metric)
    return (max(last) - min(last)) / fmean(last)


def _last_quarter(result: Result, metric: str) -> list[float]:
    values = _values(result, metric)
    return values[-max(len(values) // 4, 1) :]


def mean_of(result: Result, metric: str) -> float:
    """Returns the mean over a curve."""
    return fmean(_values(result, metric))


def growth_of(result: Result, metric: str) -> float:
    """Returns the end of a curve divided by its start."""
    return end_of(result, metric) / start_of(result, metric)


def _addition(name: str, algorithm: str | None = None, **changes: Mapping[str, Any]) -> Experiment:
    body = {"name": algorithm or name, "kl_coefficient": 0.0}
    return Experiment(name=name, algorithm=body, iterations=200, changes=changes)


def _safe_rlhf(name: str, *curves: str, iterations: int = 150, **keys: Any) -> Experiment:
    return Experiment(
        name=name,
        algorithm={**SAFE_RLHF_KEYS, **keys},
        task="constrained",
        iterations=iterations,
        curves=("constraint/cost", LAMBDA, "constraint/infeasible", "reward/mean", *curves),
    )


_NAMES = {"STALE": "stale_grpo"}


def _measured(name: str, recipe: str, task: str, iterations: int, curves: Sequence[str], **keys: Any) -> Experiment:
    algorithm = {
        "name": _NAMES.get(recipe, recipe.lower()),
        "recipe": f"separating_recipes:{recipe}",
        "kl_coefficient": 0.0,
        **keys,
    }
    return Experiment(
        name=f"{task}_{name}", algorithm=algorithm, task=task, iterations=iterations, curves=(*curves, "reward/mean")
    )


def _complete(name: str, *curves: str) -> Experiment:
    return Experiment(
        name=f"completion_{name}",
        algorithm={"name": name, "kl_coefficient": 0.0, "mini_batches": 4},
        task="completion",
        iterations=80,
        curves=("reward/mean", *curves),
    )


EXPERIMENTS = (
    *(_addition(name) for name in ("ppo", "grpo", "rloo", "remax", "reinforce_pp", "dapo")),
    _addition("grpo_shuffled", "grpo", reward={"function": "learning_tasks:shuffled_exact_match"}),
    _safe_rlhf("safe_rlhf", iterations=300),
)
"""Seven algorithms and the control, each with a mark of its own."""

_DIGIT = "eval/validation/is_right_digit"
_PTX = "actor/ptx_loss"
_NEGLIGIBLE = 1e-9

SEPARATIONS = (
    Separation(
        task="parity",
        title="length of wrong responses",
        experiments=tuple(
            _measured(name, name.upper(), "parity", 40, ("wrong/tokens", "right/tokens"))
            for name in ("grpo", "dr_grpo")
        ),
        metric="wrong/tokens",
        rule="at least 2 under `grpo`, at most 1.5 under `dr_grpo`",
        measure=lambda result: growth_of(result, "wrong/tokens"),
        passes=lambda grpo, dr_grpo: grpo >= 2 and dr_grpo <= 1.5,
        pictured=("dr_grpo",),
    ),
    Separation(
        task="mixture",
        title="hard prompts among easy ones",
        experiments=tuple(
            _measured(name, name.upper(), "mixture", 120, ("hard/score", _DIGIT)) for name in ("maxrl", "dr_grpo")
        ),
        metric="hard/score",
        rule="under `maxrl` at least twice that under `dr_grpo`",
        measure=lambda result: end_of(result, "hard/score"),
        passes=lambda maxrl, dr_grpo: maxrl >= 2 * dr_grpo,
        pictured=("maxrl",),
    ),
    Separation(
        task="extremes",
        title="groups with equal scores",
        experiments=(
            _measured("dapo", "DAPO", "extremes", 50, (_DIGIT, "group/refills", "group/filtered"), max_refills=8),
            _measured("grpo", "GRPO", "extremes", 50, (_DIGIT,)),
        ),
        metric=_DIGIT,
        rule="under `dapo` at least 1.5 times that under `grpo`",
        measure=lambda result: mean_of(result, _DIGIT) - result["before"],
        passes=lambda dapo, grpo: dapo >= 1.5 * grpo,
    ),
    Separation(
        task="stale",
        title="samples four iterations old",
        experiments=tuple(
            replace(_measured("grpo", "STALE", "stale", 60, (_DIGIT,), **keys), name=f"stale_{name}")
            for name, keys in {
                "fresh": {"sample_age": 0},
                "corrected": {"sample_age": 4, "correction": "tis"},
                "uncorrected": {"sample_age": 4},
            }.items()
        ),
        metric=_DIGIT,
        rule="corrected at least 95 % of that of fresh samples, uncorrected less",
        measure=lambda result: mean_of(result, _DIGIT),
        passes=lambda fresh, corrected, uncorrected: corrected >= 0.95 * fresh > uncorrected,
    ),
    Separation(
        task="completion",
        title="long responses to unequal prompts",
        experiments=(
            _complete("ppo", "critic/explained_variance"),
            _complete("reinforce_pp"),
        ),
        metric="reward/mean",
        rule="at least 0.9 under `ppo`, and at least 0.05 more than under `reinforce_pp`",
        measure=lambda result: end_of(result, "reward/mean"),
        passes=lambda ppo, reinforce_pp: ppo >= max(0.9, reinforce_pp + 0.05),
    ),
    Separation(
        task="constrained",
        title="language-model loss next to Safe-RLHF",
        experiments=(
            _safe_rlhf("safe_rlhf_ptx", _PTX, ptx_coefficient=0.3),
            # Rows of a coefficient this small move nothing, and are measured all the same.
            _safe_rlhf("safe_rlhf_without_ptx", _PTX, ptx_coefficient=_NEGLIGIBLE),
        ),
        metric=_PTX,
        rule="at most 0.9 with the term, at least 1 without",
        measure=lambda result: growth_of(result, _PTX),
        passes=lambda with_term, without: with_term <= 0.9 and without >= 1.0,
    ),
)
