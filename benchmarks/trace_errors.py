"""The table of docs/reference/trace-errors.md: runs of this project against what the simulators predict of them.

Runs A and B, to which constants are fitted, and C, which is scored, one after another and several times over, so that
what else the machine does falls on all of them alike; a stage's time is the median over these. Takes some ten minutes
and both of two cores, and means something on a machine that does nothing else: its load is in the page.
"""

from __future__ import annotations

import datetime
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from measurement import describe_processor

from hf_algorithms.data import write_addition_data
from hf_mapper import StageCase, TraceConstants, calibrate_traces, read_stages

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "trace-errors.md"
BEGIN, END = "<!-- trace errors -->\n", "<!-- end -->"
HYBRIDFLOW = Path(sys.executable).with_name("hybridflow")
NUM_REPEATS = 3
ITERATIONS = 8
DEADLINE_S = 600

RUNS = {
    "A": {"hidden_size": 160, "intermediate_size": 448, "num_layers": 3, "num_heads": 5, "batch": 128, "seed": 0},
    "B": {"hidden_size": 320, "intermediate_size": 896, "num_layers": 3, "num_heads": 10, "batch": 256, "seed": 0},
    "C": {"hidden_size": 224, "intermediate_size": 640, "num_layers": 4, "num_heads": 7, "batch": 192, "seed": 1},
}
SCORED = "C"
CONFIG = """
[run]
output_dir = "{output}"
seed = {seed}
iterations = {iterations}
eval_every = {iterations}
[data]
train = "{data}/train.jsonl"
validation = "{data}/validation.jsonl"
test = "{data}/test.jsonl"
[model]
tokenizer = "characters"
hidden_size = {hidden_size}
intermediate_size = {intermediate_size}
num_layers = {num_layers}
num_heads = {num_heads}
max_positions = 16
[optimizer]
actor_learning_rate = 5e-5
critic_learning_rate = 1e-3
[rollout]
batch_size = {batch}
max_new_tokens = 5
[training]
shard = "root"
[cluster]
gpus_per_machine = 2
"""
HEADER = (
    "stage",
    *(f"{name} {what}" for name in RUNS if name != SCORED for what in ("measured ms", "error %")),
    *(f"{SCORED} {what}" for what in ("measured ms", "predicted ms", "error %", "error %, not calibrated")),
)


def main() -> int:
    """Run everything and write the table into the page."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        traces = run_all(Path(folder))
        fitted = [trace for name in RUNS if name != SCORED for trace in traces[name]]
        lines = list(build_lines(traces, calibrate_traces(fitted)))
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    said = (
        f"Measured on {date}: {describe_processor()}, {os.cpu_count()} cores; load average {load:.1f} before; each run "
        f"{NUM_REPEATS} times, medians.\n\n"
    )
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE} has lost its comments"
    PAGE.write_text(before + begin + said + "\n".join(lines) + "\n" + end + after)
    print("\n".join(lines))
    return 0


def run_all(folder: Path) -> dict[str, list[Path]]:
    """The traces of every run's repeats."""
    write_addition_data(folder / "data", seed=0)
    found: dict[str, list[Path]] = {name: [] for name in RUNS}
    for repeat in range(NUM_REPEATS):
        for name, settings in RUNS.items():
            output, config = folder / f"{name}{repeat}", folder / f"{name}{repeat}.toml"
            config.write_text(CONFIG.format(output=output, data=folder / "data", iterations=ITERATIONS, **settings))
            command = [str(HYBRIDFLOW), "train", str(config)]
            subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
            found[name].append(output / "trace.json")
            print(f"{name}, {repeat + 1} of {NUM_REPEATS}", flush=True)
    return found


def build_lines(traces: Mapping[str, Sequence[Path]], constants: TraceConstants) -> Iterator[str]:
    """The table in Markdown, a line for each stage."""
    yield f"| {' | '.join(HEADER)} |"
    yield "|" + "---|" * len(HEADER)
    calibrated = {name: [read_stages(trace, constants) for trace in of_run] for name, of_run in traces.items()}
    ordinary = read_stages(traces[SCORED][0])
    for number, first in enumerate(calibrated[SCORED][0]):
        cells = [f"{first.phase}, `{first.role}.{first.method}`"]
        for name, repeats in calibrated.items():
            measured, predicted = measure([stages[number] for stages in repeats])
            cells.append(f"{1e3 * measured:.1f}")
            if name == SCORED:
                cells.append(f"{1e3 * predicted:.1f}")
            cells.append(f"{100 * (predicted / measured - 1):+.1f}")
            if name == SCORED:
                cells.append(f"{100 * (ordinary[number].predict() / measured - 1):+.1f}")
        yield f"| {' | '.join(cells)} |"


def measure(repeats: Sequence[StageCase]) -> tuple[float, float]:
    """Seconds of a stage: the median of those measured, and those predicted, which every repeat has in common."""
    return statistics.median(case.measured for case in repeats), repeats[0].predict()


if __name__ == "__main__":
    sys.exit(main())
