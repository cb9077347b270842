"""Memory, open files, threads and shared memory of a long run: PPO of a tiny model in one process, with commits.

After every iteration the run's processes are counted: this one, and those of its reward function. Targets: memory
grows by less than 5 % between the second and the last tenth of the run; the others do not grow at all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from measurement import RESULTS, record, write_table

import hf_algorithms
from hf_algorithms.data import load_rows, write_addition_data, write_rows

NUM_ITERATIONS = 1000
MAX_GROWTH = 0.05
NUM_TENTHS = 10
UNITS = {"memory_bytes": "bytes", "open_files": "files", "threads": "threads", "shared_bytes": "bytes"}
WORDS = {
    "memory_bytes": ("memory, MB", 1e6),
    "open_files": ("open files", 1),
    "threads": ("threads", 1),
    "shared_bytes": ("shared memory, bytes", 1),
}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "long-runs.md"
SERIES = RESULTS / "long_run" / "metrics.jsonl"
NUM_ROWS, NUM_KEPT = 512, 200
"""Rows to train on; points of each series that are kept for the chart."""
SETTINGS = {
    "run": {"executor": "in_process", "eval_every": 50, "checkpoint_every": 50},
    "data": {"max_eval_rows": 16},
    "model": {
        "tokenizer": "characters",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 1,
        "max_positions": 16,
    },
    "warm_start": {"max_steps": 0},
    "rollout": {"batch_size": 8, "max_new_tokens": 5},
    "training": {"shard": "root"},
    "cluster": {"gpus_per_machine": 1},
}
_SHARED = re.compile(r"/dev/shm/\S+")


def main() -> int:
    """Measure, record, and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=NUM_ITERATIONS)
    parser.add_argument("--max-seconds", type=float, help="the run stops after the iteration in which they are over")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as a rank has
    rows = run(options.iterations, options.max_seconds)
    write_series(rows)
    metrics: dict[str, tuple[float, str]] = {"iterations": (len(rows), "iterations")}
    missed = []
    for name, unit in UNITS.items():
        before, after = compare([row[name] for row in rows])
        metrics |= {f"{name}_before": (before, unit), f"{name}_after": (after, unit)}
        if after > before * (1 + MAX_GROWTH if name == "memory_bytes" else 1):
            missed.append(name)
        print(f"{'MISSED ' if name in missed else 'reached'} {name}: {before:,.0f} -> {after:,.0f} {unit}")
    record("long_run", metrics)
    write_table(PAGE, "long_run", build_table({name: value for name, (value, _) in metrics.items()}))
    return int(bool(missed))


def run(iterations: int, max_seconds: float | None) -> list[dict[str, float]]:
    """Trains, and returns memory, files and threads of the processes after every iteration."""
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = write_addition_data(Path(folder, "data"), seed=0)
        write_rows(files.train, load_rows(files.train)[:NUM_ROWS])
        hf_algorithms.train(
            dataset={"train": str(files.train), "validation": str(files.validation)},
            reward="exact_match",
            config=SETTINGS,
            set={"run.iterations": iterations} | ({"run.max_seconds": max_seconds} if max_seconds else {}),
            output_dir=Path(folder, "run"),
            on_metrics=lambda iteration, _: rows.append({"iteration": iteration, **count_held()}),
        )
    return rows


def count_held() -> dict[str, float]:
    """Returns memory, files and threads of this process and its children; memory that several share counts once."""
    own = psutil.Process()
    found = dict.fromkeys(UNITS, 0.0)
    shared: set[tuple[int, int]] = set()
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, OSError):
            found["memory_bytes"] += process.memory_info().rss
            found["open_files"] += process.num_fds()
            found["threads"] += process.num_threads()
            shared |= set(_list_shared(process.pid))
    found["shared_bytes"] = float(sum(size for _, size in shared))
    return found


def _list_shared(pid: int) -> Iterator[tuple[int, int]]:
    """Number and size of each file in /dev/shm that a process has open or mapped, also of one without a name."""
    for folder in ("fd", "map_files"):
        for entry in Path(f"/proc/{pid}/{folder}").iterdir():
            with suppress(OSError):
                if _SHARED.match(os.readlink(entry)):
                    status = entry.stat()
                    yield status.st_ino, status.st_size


def compare(values: list[float]) -> tuple[float, float]:
    """Medians of the second and of the last tenth: in the first caches fill."""
    tenth = max(1, len(values) // NUM_TENTHS)
    return statistics.median(values[tenth : 2 * tenth]), statistics.median(values[-tenth:])


def build_table(figures: Mapping[str, float]) -> str:
    """Returns the table of the page."""
    lines = [f"| over {figures['iterations']:,} iterations | second tenth | last tenth |", "|---|--:|--:|"]
    for name, (words, size) in WORDS.items():
        before, after = (f"{figures[f'{name}_{when}'] / size:,.4g}" for when in ("before", "after"))
        lines.append(f"| {words} | {before} | {after} |")
    return "\n".join(lines)


def write_series(rows: list[dict[str, float]]) -> None:
    """Some of the rows, for the chart: `scripts/draw_curves.py` reads them as those of a run."""
    kept: list[dict[str, Any]] = [
        {
            "iteration": row["iteration"],
            "memory_mb": round(row["memory_bytes"] / 1e6, 2),
            "open_files": row["open_files"],
            "threads": row["threads"],
            "shared_mb": round(row["shared_bytes"] / 1e6, 2),
        }
        for row in rows[:: max(1, len(rows) // NUM_KEPT)]
    ]
    SERIES.parent.mkdir(parents=True, exist_ok=True)
    SERIES.write_text("".join(json.dumps(row) + "\n" for row in kept))


if __name__ == "__main__":
    raise SystemExit(main())
