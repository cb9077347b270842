"""Print each lane of `.ci/run` next to its budget.

`.ci/run` writes a line when a lane starts and one when it ends; this program reads them, also of a run that failed
half-way, and prints one row a lane. It always ends well: seconds on a loaded machine prove nothing, so a lane over its
budget is said aloud and fails nobody. The CPU seconds next to them distinguish a slow lane from a busy machine.

    .ci/run                                   ends with this table
    scripts/ci_budget.py                      prints it again for the last run
    scripts/ci_budget.py FILE                 reads another file

A line is `lane<TAB>started`, or `lane<TAB>passed|FAILED<TAB>seconds<TAB>CPU seconds`. Needs the standard library only:
it reports a run whose environment could not be set up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

LANES = Path(__file__).resolve().parents[1] / ".cache" / "ci_lanes.tsv"
"""File in which `.ci/run` writes the seconds of its lanes."""

BUDGETS_S = {
    "env": 40,
    "check docs wheels": 80,
    "test": 600,
    "test-slow": 1440,
    "test-vllm test-sglang test-trackers": 840,
}
"""Seconds of each lane on two cores that do nothing else, in the order of `.ci/run`: 50 minutes together."""

ALLOWANCES_MIN = {"algorithms": 5, "models and data": 6, "commands": 6, "durable runs": 8, "speed": 3, "house": 0}
"""Minutes that later subjects may add to the lanes. What needs more gets a target of its own."""


class LaneStatus(NamedTuple):
    """Status of a lane, and its seconds if it ended."""

    status: str
    seconds: float | None = None
    cpu_s: float | None = None


def read_lanes(lines: Iterable[str]) -> dict[str, LaneStatus]:
    """Returns the last word about each lane; a lane that started and did not end was cut off."""
    lanes: dict[str, LaneStatus] = {}
    for line in lines:
        name, status, *numbers = line.rstrip("\n").split("\t")
        if status == "started":
            lanes[name] = LaneStatus("CUT OFF")
        else:
            lanes[name] = LaneStatus(status, *map(float, numbers))
    return lanes


def format_report(lanes: Mapping[str, LaneStatus]) -> Iterator[str]:
    """Yields the table's lines: every lane with a budget, then lanes without one, the sum and the allowances."""
    yield f"{'lane':<35} {'status':<8} {'seconds':>8} {'budget':>8} {'CPU s':>8}"
    for name in [*BUDGETS_S, *(lane for lane in lanes if lane not in BUDGETS_S)]:
        lane, budget_s = lanes.get(name, LaneStatus("not run")), BUDGETS_S.get(name)
        yield _format_row(name, lane.status, lane.seconds, budget_s, lane.cpu_s)
    ended = {name: lane for name, lane in lanes.items() if lane.seconds is not None}
    total_s = sum(lane.seconds or 0.0 for lane in ended.values())
    total_cpu_s = sum(lane.cpu_s or 0.0 for lane in ended.values())
    whole = "whole" if ended.keys() >= BUDGETS_S.keys() else "in part"
    yield _format_row("together", whole, total_s, sum(BUDGETS_S.values()), total_cpu_s)
    allowances = ", ".join(f"{subject} {minutes}" for subject, minutes in ALLOWANCES_MIN.items())
    yield f"minutes that later subjects may add: {allowances}"


def _format_row(name: str, status: str, seconds: float | None, budget_s: float | None, cpu_s: float | None) -> str:
    numbers = " ".join("       -" if number is None else f"{number:8.0f}" for number in (seconds, budget_s, cpu_s))
    over_s = 0.0 if seconds is None or budget_s is None else seconds - budget_s
    return f"{name:<35} {status:<8} {numbers}" + (f"   OVER BUDGET by {over_s:.0f} s" if over_s > 0 else "")


def main(arguments: list[str]) -> int:
    """Prints the report of a run."""
    path = Path(arguments[0]) if arguments else LANES
    if not path.exists():
        print(f"{path}: no lanes are written there. Run .ci/run first", file=sys.stderr)
        return 2
    print("\n".join(format_report(read_lanes(path.read_text().splitlines()))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
