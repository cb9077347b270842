"""Writes the tables of `bench_end_to_end.py` into the page "Make it fast", from the results that are there.

The benchmark calls it; on its own it writes them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from end_to_end_workloads import GOAL, WORKLOADS
from measurement import RESULTS, write_table
from peer_environments import ROOT

__all__ = ["TARGETS", "write_page"]

TARGETS = {"tiny": 1.5, "shared_prompts": 2.5, "long_answers": 1.3, "tiny_ppo": 3.0}
"""Times the peer's best samples a second."""
_PAGE = ROOT / "docs" / "how-to" / "make-it-fast.md"
_SYSTEMS = {
    "ours_1x1": "one thread",
    "ours_1x2": "two threads",
    "ours_2x1": "two ranks",
    "trl_1x1": "one thread",
    "trl_1x2": "two threads",
    "trl_2x1": "two ranks",
    "bare_1x1": "one thread",
    "bare_1x2": "two threads",
}
_SIDES = {"ours": "here", "trl": "TRL", "bare": "plain loop"}
_BACKENDS = {"vllm": "vLLM", "sglang": "SGLang"}
"""Engines that may generate on our side in place of transformers."""
_RATES = (
    "workload",
    *(f"{side}, samples/s" for side in _SIDES.values()),
    "relative to TRL",
    "target",
    "relative to the loop",
)
_PHASES = ("generate", "score", "logprobs", "update", "advantages", "sync")


def write_page() -> None:
    """Tables of rates, of memory, and of the phases of each side's fastest system."""
    found = {name: metrics for name in WORKLOADS if (metrics := _read(name))}
    rates = [f"| {' | '.join(_RATES)} |", "|---|" + "--:|" * (len(_RATES) - 1)]
    names = " | ".join(f"`{name}`" for name in found)
    memory = [f"| MiB | {names} |", "|---|" + "--:|" * len(found)]
    best = {name: _find_fastest(metrics) for name, metrics in found.items()}
    columns = [(name, system, f"{_SIDES[side]} `{name}`") for name in found for side, system in best[name].items()]
    phases = [f"| ms an iteration | {' | '.join(each for *_, each in columns)} |", "|---|" + "--:|" * len(columns)]
    for name, metrics in found.items():
        rates.append(f"| `{name}` | {_list_rates(metrics, TARGETS[name])} |")
        rates += [
            f"| `{name}`, here with {words} | {_list_rates(metrics)} |"
            for backend, words in _BACKENDS.items()
            if (metrics := _read(f"{name}_{backend}"))
        ]
    for cores in ("1x2", "2x1"):
        for side in ("ours", "trl"):
            for kind, words in (("resident", "peak"), ("grown", "growth after the start")):
                cells = [f"{metrics[f'{side}_{cores}_{kind}']:,.0f}" for metrics in found.values()]
                memory.append(f"| {_SIDES[side]}, {_SYSTEMS[f'{side}_{cores}']}, {words} | {' | '.join(cells)} |")
    for phase in (*_PHASES, "rest", "operations"):
        cells = [_phase(found[name], system, phase) for name, system, _ in columns]
        phases.append(f"| {phase} | {' | '.join(cells)} |")
    _write_race()
    workloads = {name: f"`{name}`" for name in found}
    engines = {f"{name}_{each}": f"`{name}` with {words}" for name in found for each, words in _BACKENDS.items()}
    hardware = _name_hardware(workloads)
    write_table(_PAGE, "memory of bench_end_to_end", "\n".join(memory), hardware=hardware)
    write_table(_PAGE, "rates of bench_end_to_end", "\n".join(rates), hardware=_name_hardware(workloads | engines))
    write_table(_PAGE, "phases of bench_end_to_end", "\n".join(phases), hardware=hardware)


def _read(name: str) -> dict[str, float]:
    """The metrics of a result; none without it."""
    return {metric: each["value"] for metric, each in _load(name).get("metrics", {}).items()}


def _load(name: str) -> dict[str, Any]:
    path = RESULTS / f"end_to_end_{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _name_hardware(results: Mapping[str, str]) -> str:
    """Names where results were measured, which are given with their words; these follow where machines differ."""
    of: dict[str, list[str]] = {}
    for name, words in results.items():
        if hardware := _load(name).get("hardware"):
            of.setdefault(f"{hardware['num_cores']} cores of: {hardware['cpu']}", []).append(words)
    if len(of) == 1:
        return next(iter(of))
    return ", and on ".join(f"{machine} ({', '.join(words)})" for machine, words in of.items())


def _write_race() -> None:
    """One table of the seconds and iterations to the goal, if they have been measured."""
    found = _read("race")
    if not found:
        return
    seeds = sorted({int(name.split("_")[2]) for name in found if name.startswith("ours_seed_")})
    rows = [f"| to {GOAL.score} | {' | '.join(f'seed {seed}' for seed in seeds)} |", "|---|" + "--:|" * len(seeds)]
    for side, words in (("ours", "here"), ("trl", "TRL")):
        cells = [
            f"{found[f'{side}_seed_{seed}']:.1f} s, {found[f'{side}_seed_{seed}_iterations']:.0f} iterations"
            for seed in seeds
        ]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    write_table(_PAGE, "race of bench_end_to_end", "\n".join(rows), hardware=_name_hardware({"race": "the race"}))


def _find_fastest(metrics: Mapping[str, float]) -> dict[str, str]:
    """By side that was measured, its fastest system."""
    found: dict[str, str] = {}
    for system in _SYSTEMS:
        side = system.partition("_")[0]
        rate = metrics.get(f"{system}_median")
        if rate is not None and (side not in found or rate > metrics[f"{found[side]}_median"]):
            found[side] = system
    return found


def _list_rates(metrics: Mapping[str, float], target: float | None = None) -> str:
    """The cells of a row of rates after its name."""
    best = _find_fastest(metrics)
    cells = [_rate(metrics, best[side]) if side in best else "" for side in _SIDES]
    cells += [f"**{metrics['speed_up']:.2f}**", "" if target is None else str(target)]
    cells.append(f"{metrics['of_bare']:.2f}" if "of_bare" in metrics else "")
    return " | ".join(cells)


def _rate(metrics: Mapping[str, float], system: str) -> str:
    median, slowest, fastest = (metrics[f"{system}_{kind}"] for kind in ("median", "slowest", "fastest"))
    digits = 0 if median >= 100 else 2
    return f"{median:.{digits}f} ({slowest:.{digits}f} to {fastest:.{digits}f}), {_SYSTEMS[system]}"


def _phase(metrics: Mapping[str, float], system: str, phase: str) -> str:
    return f"{metrics[f'{system}_{phase}']:,.0f}" if f"{system}_{phase}" in metrics else ""


if __name__ == "__main__":
    write_page()
