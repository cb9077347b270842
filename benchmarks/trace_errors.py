"""The table of docs/reference/trace-errors.md: runs of this project against what the simulators predict of them.

Runs to which constants are fitted, and others, which are scored, one after another and several times over, so that what
else the machine does falls on all of them alike; a stage's time is the median over these. Takes some ten minutes and
both of two cores, and means something on a machine that does nothing else: its load is in the page.
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
from hf_mapper import TraceConstants, calibrate_traces, read_stages

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "trace-errors.md"
BEGIN, END = "<!-- trace errors -->\n", "<!-- end -->"
HYBRIDFLOW = Path(sys.executable).with_name("hybridflow")
NUM_REPEATS = 3
ITERATIONS = 8
DEADLINE_S = 600

SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "batch", "seed")
FITTED = {"A": (160, 448, 3, 5, 128, 0), "B": (320, 896, 3, 10, 256, 0)}
SCORED = {"C": (224, 640, 4, 7, 192, 1), "D": (128, 352, 6, 4, 256, 2), "E": (448, 1280, 2, 14, 128, 3)}
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


def main() -> int:
    """Run everything and write the table into the page."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        traces = run_all(Path(folder))
        constants = calibrate_traces([trace for name in FITTED for trace in traces[name]])
        fitted, scored = ({name: traces[name] for name in names} for names in (FITTED, SCORED))
        tables = [build_table("fitted on", fitted, constants), build_table("scored on", scored, constants)]
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    said = (
        f"Measured on {date}: {describe_processor()}, {os.cpu_count()} cores; load average {load:.1f} before; each run "
        f"{NUM_REPEATS} times, medians.\n\n"
    )
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE} has lost its comments"
    PAGE.write_text(before + begin + said + "\n\n".join(tables) + "\n" + end + after)
    print("\n\n".join(tables))
    return 0


def run_all(folder: Path) -> dict[str, list[Path]]:
    """The traces of every run's repeats."""
    write_addition_data(folder / "data", seed=0)
    runs = {**FITTED, **SCORED}
    found: dict[str, list[Path]] = {name: [] for name in runs}
    for repeat in range(NUM_REPEATS):
        for name, sizes in runs.items():
            output, config = folder / f"{name}{repeat}", folder / f"{name}{repeat}.toml"
            settings = dict(zip(SIZES, sizes, strict=True))
            config.write_text(CONFIG.format(output=output, data=folder / "data", iterations=ITERATIONS, **settings))
            command = [str(HYBRIDFLOW), "train", str(config)]
            subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
            found[name].append(output / "trace.json")
            print(f"{name}, {repeat + 1} of {NUM_REPEATS}", flush=True)
    return found


def build_table(title: str, traces: Mapping[str, Sequence[Path]], constants: TraceConstants) -> str:
    """Each run's stages in Markdown: milliseconds, the error in percent, and that of constants that know no run."""
    columns = ("ms", "error %", "not calibrated: error %")
    header = (f"{title}", *(f"{name}: {column}" for name in traces for column in columns))
    return "\n".join([f"| {' | '.join(header)} |", "|" + "---|" * len(header), *build_lines(traces, constants)])


def build_lines(traces: Mapping[str, Sequence[Path]], constants: TraceConstants) -> Iterator[str]:
    calibrated, ordinary = (
        {name: [read_stages(trace, known) for trace in repeats] for name, repeats in traces.items()}
        for known in (constants, None)
    )
    for number, first in enumerate(next(iter(calibrated.values()))[0]):
        cells = [f"{first.phase}, `{first.role}.{first.method}`"]
        for name in traces:
            measured = statistics.median(stages[number].measured for stages in calibrated[name])
            cells.append(f"{1e3 * measured:.1f}")
            cells += [
                f"{100 * (known[name][0][number].predict() / measured - 1):+.1f}" for known in (calibrated, ordinary)
            ]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
