"""The page of the learning benchmark: its tables, its pictures, and one picture for each algorithm's page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from constrained_text import COST_LIMIT
from learning_curves import draw_curves
from learning_experiments import ACCURACY, EXPERIMENTS, LAMBDA, SEPARATIONS, Separation, end_of, spread_of
from measurement import record, write_table

__all__ = ["write_page"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "learning-curves.md"
ASSETS = ROOT / "docs" / "assets" / "curves"

Results = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Finished runs by experiment and seed."""


def write_page(results: Results) -> None:
    """Writes the dated result, the page's tables and the pictures, from the runs that have finished."""
    record("learning", dict(_list_metrics(results)))
    ASSETS.mkdir(parents=True, exist_ok=True)
    pictures = dict(_draw(results))
    for name, picture in pictures.items():
        (ASSETS / f"{name}.svg").write_text(picture)
    shown = [name for name in ("addition", "safe_rlhf", *(each.task for each in SEPARATIONS)) if name in pictures]
    links = [f"![{_ALT.get(name, name)}](../assets/curves/{name}.svg)" for name in shown]
    tables = (_rows(results), _lambda_rows(results), _separation_rows(results))
    parts = [*("\n".join(rows) for rows in tables), *links]
    write_table(PAGE, "learning_curves", "\n\n".join(parts))


def _list_metrics(results: Results) -> Iterator[tuple[str, tuple[float, str]]]:
    for experiment in EXPERIMENTS:
        for seed, result in results[experiment.name].items():
            yield f"{experiment.name}_seed_{seed}", (round(experiment.judge(result)[0], 4), experiment.measure)
            if experiment.task == "constrained":
                spread = round(spread_of(result, LAMBDA), 4)
                yield f"{experiment.name}_lambda_seed_{seed}", (spread, "spread of lambda, last quarter")
    for separation in SEPARATIONS:
        for experiment, numbers in zip(separation.experiments, _measure(separation, results), strict=True):
            if numbers:
                yield experiment.name, (round(sum(numbers) / len(numbers), 4), f"{separation.title}: mean over seeds")


def _measure(separation: Separation, results: Results) -> list[list[float]]:
    return separation.measure_all([results[each.name] for each in separation.experiments])


def _rows(results: Results) -> Iterator[str]:
    yield "| algorithm | task | seeds | before | after: mean, least and most | CPU seconds, first seed | passes |"
    yield "| --- | --- | --: | --: | --: | --: | --: |"
    for experiment in EXPERIMENTS:
        found = list(results[experiment.name].values())
        if not found:
            yield f"| `{experiment.name}` | {experiment.task} | 0 | - | - | - | - |"
            continue
        is_constrained = experiment.task == "constrained"
        task = f"constrained text, limit {COST_LIMIT}" if is_constrained else "addition"
        before = "-" if is_constrained else f"{found[0]['before']:.3f}"
        judged = [experiment.judge(result) for result in found]
        after = [number for number, _ in judged]
        spread = f"{sum(after) / len(after):.3f}, {min(after):.3f} to {max(after):.3f}"
        passed = f"{sum(passes for _, passes in judged)} of {len(judged)}"
        used = f"{found[0]['cpu_s']:.0f}"
        yield f"| `{experiment.name}` | {task} | {len(found)} | {before} | {spread} | {used} | {passed} |"


def _lambda_rows(results: Results) -> Iterator[str]:
    yield "| `safe_rlhf`, last quarter: seed | lambda | its spread | cost | reward |"
    yield "| --: | --: | --: | --: | --: |"
    for seed, result in results["safe_rlhf"].items():
        spread = f"{100 * spread_of(result, LAMBDA):.1f} %"
        cost, reward = (f"{end_of(result, metric):.3f}" for metric in ("constraint/cost", "reward/mean"))
        yield f"| {seed} | {end_of(result, LAMBDA):.3f} | {spread} | {cost} | {reward} |"


def _separation_rows(results: Results) -> Iterator[str]:
    yield "| task | passes if | mean, and each seed | passes |"
    yield "| --- | --- | --- | --- |"
    for separation in SEPARATIONS:
        found = [results[each.name] for each in separation.experiments]
        verdict = {True: "yes", False: "no", None: "-"}[separation.judge(found)]
        numbers = "<br>".join(
            f"`{_short(separation, experiment.name)}` {_list_numbers(each)}"
            for experiment, each in zip(separation.experiments, separation.measure_all(found), strict=True)
        )
        yield f"| {separation.title} | {separation.rule} | {numbers} | {verdict} |"


def _list_numbers(numbers: Sequence[float]) -> str:
    if not numbers:
        return "-"
    mean, *each = (f"{number:.2f}".replace("-0.00", "0.00") for number in (sum(numbers) / len(numbers), *numbers))
    return f"{mean} ({', '.join(each)})"


def _short(separation: Separation, name: str) -> str:
    return name.removeprefix(f"{separation.task}_").removeprefix("safe_rlhf_")


def _draw(results: Results) -> Iterator[tuple[str, str]]:
    """Pictures by name: of tasks, and of algorithms."""
    addition = {each.name: list(results[each.name].values()) for each in EXPERIMENTS if each.task == "addition"}
    addition = {name: found for name, found in addition.items() if found}
    if addition:
        named = {name: _curves(found, ACCURACY) for name, found in addition.items()}
        yield "addition", draw_curves({"exact match": named})
    for name, found in addition.items():
        panels = {"exact match": ACCURACY, "mean reward": "reward/mean"}
        yield name, draw_curves({title: {name: _curves(found, metric)} for title, metric in panels.items()})
    if constrained := list(results["safe_rlhf"].values()):
        panels = {"mean cost": "constraint/cost", "lambda": LAMBDA, "mean reward": "reward/mean"}
        yield (
            "safe_rlhf",
            draw_curves({title: {"safe_rlhf": _curves(constrained, each)} for title, each in panels.items()}),
        )
    for separation in SEPARATIONS:
        found_by = {
            _short(separation, each.name): _curves(list(results[each.name].values()), separation.metric)
            for each in separation.experiments
            if results[each.name]
        }
        if found_by:
            picture = draw_curves({_TITLE[separation.task]: found_by})
            for name in (separation.task, *separation.pictured):
                yield name, picture


def _curves(found: Sequence[Mapping[str, Any]], metric: str) -> list[list[tuple[float, float]]]:
    return [result["curves"][metric] for result in found]


_TITLE = {
    "parity": "tokens of wrong responses",
    "mixture": "score of hard prompts",
    "extremes": "solved prompts, share",
    "stale": "solved prompts, share",
    "completion": "mean reward",
    "constrained": "loss on training answers",
}
_ALT = {
    "addition": "Exact match on the validation rows over the iterations, by algorithm",
    "safe_rlhf": "Mean cost, multiplier and reward over the iterations of Safe-RLHF",
    **{name: f"Over the iterations: {title}" for name, title in _TITLE.items()},
}

assert {each.task for each in SEPARATIONS} <= _TITLE.keys(), "a task has no title"
