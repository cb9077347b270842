"""Keeps how long the message of each cell of the failure matrix took, which `make test-failures` writes down.

    python benchmarks/failure_table.py .cache/failures.jsonl

Writes `results/failures.json` and the table of `docs/reference/recovery-contract.md`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from measurement import record, write_table

__all__ = ["render"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "recovery-contract.md"
HOWS = {"raise": "an exception", "exit": "`os._exit(7)`", "SIGKILL": "SIGKILL", "SIGSTOP": "SIGSTOP"}
PLACES = {"construction": "construction", "before": "before a collective", "inside": "inside one",
          "after": "after it", "generation": "generation", "commit": "commit"}  # fmt: skip

Cell = tuple[str, str, str]


def read_cells(lines: Sequence[str]) -> Mapping[Cell, Sequence[float]]:
    """Returns the seconds to the message by what the rank did, where, and the launcher."""
    seconds: dict[Cell, list[float]] = defaultdict(list)
    for line in lines:
        row = json.loads(line)
        seconds[row["how"], row["place"], row["launcher"]].append(row["seconds"])
    return seconds


def render(cells: Mapping[Cell, Sequence[float]]) -> str:
    """Returns the table of the page."""
    rows = [f"| rank 1 ends by | under | {' | '.join(PLACES.values())} |", f"|---|---|{'--:|' * len(PLACES)}"]
    for how, shown in HOWS.items():
        for launcher, name in (("ray", "Ray"), ("torchrun", "torchrun")):
            found = [cells.get((how, place, launcher), ()) for place in PLACES]
            times = [", ".join(f"{each:.1f}" for each in seconds) for seconds in found]
            rows.append(f"| {shown} | {name} | {' | '.join(times)} |")
    return "\n".join(rows)


def main() -> int:
    """Writes the result and the table; returns 0."""
    (path,) = sys.argv[1:]
    cells = read_cells(Path(path).read_text(encoding="utf-8").splitlines())
    metrics = {"_".join(cell): (round(statistics.median(each), 2), "s") for cell, each in cells.items()}
    record("failures", metrics)
    write_table(PAGE, "failures", render(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
