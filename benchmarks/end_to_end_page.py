"""Writes the tables of `bench_end_to_end.py` into the page "Make it fast", from the results that are there.

The benchmark calls it; on its own it writes them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from end_to_end_workloads import WORKLOADS
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
}
_PHASES = ("generate", "score", "logprobs", "update", "advantages", "sync")


def write_page() -> None:
    """One table of rates and memory, and one of phases of each side's fastest system."""
    found = {}
    for name in WORKLOADS:
        path = RESULTS / f"end_to_end_{name}.json"
        if path.exists():
            metrics = json.loads(path.read_text())["metrics"]
            found[name] = {metric: each["value"] for metric, each in metrics.items()}
    rates = [
        "| workload | here, samples/s | TRL, samples/s | times TRL | wanted | here, MiB | TRL, MiB |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    columns = [f"{side} {name}" for name in found for side in ("here", "TRL")]
    phases = [f"| ms an iteration | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    best = {name: tuple(_fastest(metrics, side) for side in ("ours", "trl")) for name, metrics in found.items()}
    for name, metrics in found.items():
        cells = [f"{_rate(metrics, each)}, {_SYSTEMS[each]}" for each in best[name]]
        memory = [f"{metrics[f'{each}_resident']:,.0f}" for each in best[name]]
        rates.append(
            f"| `{name}` | {cells[0]} | {cells[1]} | **{metrics['speed_up']:.2f}** | {TARGETS[name]} | "
            f"{memory[0]} | {memory[1]} |"
        )
    for phase in (*_PHASES, "rest"):
        cells = [_phase(found[name], each, phase) for name in found for each in best[name]]
        phases.append(f"| {phase} | {' | '.join(cells)} |")
    write_table(_PAGE, "rates of bench_end_to_end", "\n".join(rates))
    write_table(_PAGE, "phases of bench_end_to_end", "\n".join(phases))


def _fastest(metrics: Mapping[str, float], side: str) -> str:
    return max((each for each in _SYSTEMS if each.startswith(side)), key=lambda each: metrics[f"{each}_median"])


def _rate(metrics: Mapping[str, float], system: str) -> str:
    median, slowest, fastest = (metrics[f"{system}_{kind}"] for kind in ("median", "slowest", "fastest"))
    digits = 0 if median >= 100 else 2
    return f"{median:.{digits}f} ({slowest:.{digits}f} to {fastest:.{digits}f})"


def _phase(metrics: Mapping[str, float], system: str, phase: str) -> str:
    if phase == "rest":
        value = metrics[f"{system}_wall"] - sum(metrics.get(f"{system}_{each}", 0.0) for each in _PHASES)
    elif f"{system}_{phase}" not in metrics:
        return ""
    else:
        value = metrics[f"{system}_{phase}"]
    return f"{value:,.0f}"


if __name__ == "__main__":
    write_page()
