"""The table of the page "Train on GSM8K", made of the figures in `results/gsm8k.json` alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from measurement import record, write_table

__all__ = ["MARK_POINTS", "Results", "build_table", "gain_of", "list_metrics", "write_page"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "train-on-gsm8k.md"
MARK_POINTS = 10.0
"""Of exact match on held-out steps, which GRPO gains in every seed."""

Results = dict[str, dict[int, dict[str, Any]]]
"""Finished runs by stage and seed."""

_LOSS = "nats per token, lower is better"
_MEASURES = {
    "steps_sft": ("loss on 305 held-out steps", _LOSS, 3),
    "steps_grpo": ("exact results on 305 held-out steps", "%", 1),
    "problems_sft": ("loss on held-out problems", _LOSS, 3),
    "reward": ("right order of 181 held-out pairs", "%", 1),
    "ppo": ("reward model's score on held-out problems", "score", 3),
}
"""Of each stage: words for the table, unit, decimals."""
_PERCENT = ("steps_grpo", "reward")


def gain_of(result: Mapping[str, Any]) -> float:
    """Points of exact match between the first and the last evaluation."""
    return float(100 * (result["score_after"] - result["score_before"]))


def write_page(results: Results) -> None:
    """Writes the dated result and the page's table, from the runs that have finished."""
    metrics = dict(list_metrics(results))
    commits = sorted({found["commit"] for by_seed in results.values() for found in by_seed.values()})
    record("gsm8k", metrics, versions={"commit": " ".join(commits)})
    write_table(PAGE, "gsm8k", build_table({name: value for name, (value, _) in metrics.items()}))


def list_metrics(results: Results) -> Iterator[tuple[str, tuple[float, str]]]:
    """Yields the name of each figure with its value and unit."""
    for stage, (_, unit, decimals) in _MEASURES.items():
        factor = 100 if stage in _PERCENT else 1
        for seed, found in results[stage].items():
            end = f"seed_{seed}"
            for when in ("before", "after"):
                yield f"{stage}_{when}_{end}", (round(factor * found[f"score_{when}"], decimals), unit)
            for side, value in zip(("low", "high"), found.get("interval_after", ()), strict=False):
                yield f"{stage}_{side}_{end}", (round(factor * value, decimals), unit)
            if stage == "ppo":
                yield from _list_ppo(found, end)
            yield f"{stage}_cpu_{end}", (found["cpu_s"], "s")


def _list_ppo(found: Mapping[str, Any], end: str) -> Iterator[tuple[str, tuple[float, str]]]:
    """Lists figures of PPO other than its score: KL, its samples' score, and the share of right samples."""
    kl, curves = found["kl_to_reference"], found["curves"]
    yield f"ppo_kl_{end}", (round(kl["value"], 2), f"{kl['unit']}, {kl['estimator']}")
    scores, solved = ([value for _, value in curves[f"reward/{name}/mean"]] for name in ("model", "solved"))
    for when, part in (("first", scores[:10]), ("last", scores[-10:])):
        yield f"ppo_{when}_{end}", (round(sum(part) / len(part), 3), f"score of samples, {when} ten iterations")
    yield f"ppo_solved_{end}", (round(100 * sum(solved) / len(solved), 2), "% of the sampled responses")


def build_table(metrics: Mapping[str, float]) -> str:
    """Returns the page's table in Markdown: means over seeds, and each seed."""
    return "\n".join(_rows(metrics))


def _rows(metrics: Mapping[str, float]) -> Iterator[str]:
    yield "| run | measured | before | after | change | CPU seconds |"
    yield "| --- | --- | --- | --- | --- | --: |"
    for stage, (measured, _, decimals) in _MEASURES.items():
        before, after, used = (_seeds(metrics, stage, name) for name in ("before", "after", "cpu"))
        if not after:
            yield f"| `{stage}` | {measured} | not run | | | |"
            continue
        unit = " %" if stage in _PERCENT else ""
        change = {seed: after[seed] - before[seed] for seed in after}
        cells = [_show(before, decimals, unit), _show(after, decimals, unit), _show(change, decimals, "", signed=True)]
        yield f"| `{stage}` | {measured} | {' | '.join(cells)} | {_mean(used):.0f} |"
        if low := _seeds(metrics, stage, "low"):
            high = _seeds(metrics, stage, "high")
            intervals = ", ".join(f"{low[seed]:.1f} to {high[seed]:.1f} %" for seed in low)
            yield f"| `{stage}` | its 95 % interval, each seed | | {intervals} | | |"
    first, last = (_seeds(metrics, "ppo", when) for when in ("first", "last"))
    if first:
        change = {seed: last[seed] - first[seed] for seed in first}
        cells = f"{_show(first, 3, '')} | {_show(last, 3, '')} | {_show(change, 3, '', signed=True)}"
        yield f"| `ppo` | score of sampled responses, first and last ten iterations | {cells} | |"
        kl, solved = (_seeds(metrics, "ppo", name) for name in ("kl", "solved"))
        yield f"| `ppo` | KL to the starting model, nats per response | | {_show(kl, 2, '')} | | |"
        yield f"| `ppo` | problems solved while training | | {_show(solved, 2, ' %')} | | |"


def _seeds(metrics: Mapping[str, float], stage: str, name: str) -> dict[int, float]:
    start = f"{stage}_{name}_seed_"
    return {int(key.removeprefix(start)): value for key, value in metrics.items() if key.startswith(start)}


def _show(values: Mapping[int, float], decimals: int, unit: str, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    mean, *each = (f"{value:{sign}.{decimals}f}" for value in (_mean(values), *values.values()))
    return f"{mean}{unit} ({', '.join(each)})"


def _mean(values: Mapping[int, float]) -> float:
    return sum(values.values()) / len(values)
