"""`hybridflow doctor --calibrate`: the same short runs of GRPO with one rank and with two, on all cores of the host."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from hf_algorithms.data import write_addition_data
from hf_algorithms.preflight.calibration import ARRANGEMENTS, HostTiming, check_writable, write_calibration
from hf_engine.model_directory import read_model_directory
from hf_protocols import BackendError, ConfigError, read_machine_limits

__all__ = ["calibrate_host"]

_MODELS: tuple[Mapping[str, int], ...] = (
    {"hidden_size": 128, "intermediate_size": 384, "num_layers": 4, "num_heads": 4},
    {"hidden_size": 384, "intermediate_size": 1024, "num_layers": 6, "num_heads": 6},
)
"""Of 0.8 and 10.6 million parameters."""
_WARM_UP, _MEASURED = 2, 8
"""Iterations that do not count, and those that do."""
_DEADLINE_S = 300.0
_CONFIG = """
[run]
output_dir = "{folder}/run"
iterations = {iterations}
eval_every = {iterations}

[data]
train = "{folder}/train.jsonl"
validation = "{folder}/validation.jsonl"
test = "{folder}/test.jsonl"
max_eval_rows = 2

[model]
tokenizer = "characters"
max_positions = 16
{model}

[algorithm]
name = "grpo"
kl_coefficient = 0.0

[rollout]
batch_size = 16
samples_per_prompt = 8
max_new_tokens = 5

[training]
shard = "root"

[cluster]
gpus_per_machine = {ranks}
"""


def calibrate_host(*, as_json: bool) -> None:
    """Measures an iteration for every size of a model and number of ranks, prints the times, and keeps them.

    Raises:
        ConfigError: on a host with one core, or if the file cannot be written.
        BackendError: if a run fails or does not end.
    """
    num_cores = read_machine_limits().num_cpus
    if num_cores < max(ARRANGEMENTS):
        raise ConfigError(f"--calibrate: this host has {num_cores} core, and compares one rank with two on two or more")
    check_writable()
    timings = []
    for sizes in _MODELS:
        for ranks in ARRANGEMENTS:
            with TemporaryDirectory() as folder:
                timings.append(found := _measure(Path(folder), sizes, ranks))
            if not as_json:
                click.echo(
                    f"{found.parameters / 1e6:.1f} million parameters, {ranks} x {num_cores // ranks} threads: "
                    f"{found.seconds:.3f} s an iteration"
                )
    path = write_calibration(timings, num_cores=num_cores)
    if as_json:
        click.echo(path.read_text(encoding="utf-8").rstrip())
    else:
        click.echo(f"kept in {path}: runs without cluster.gpus_per_machine take the faster number of ranks")


def _measure(folder: Path, sizes: Mapping[str, int], ranks: int) -> HostTiming:
    write_addition_data(folder, seed=0)
    model = "\n".join(f"{key} = {value}" for key, value in sizes.items())
    config = folder / "config.toml"
    config.write_text(_CONFIG.format(folder=folder, iterations=_WARM_UP + _MEASURED, model=model, ranks=ranks))
    command = [sys.executable, "-c", "from hf_algorithms.cli import main; main()", "train", str(config)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise BackendError(f"a run of {ranks} ranks for the calibration is not done after {_DEADLINE_S:g} s") from None
    if ended.returncode:
        why = ended.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise BackendError(f"a run of {ranks} ranks for the calibration ended with {ended.returncode}: {why[0]}")
    rows: list[dict[str, Any]] = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    times = [row["time/iteration_s"] for row in rows if row["iteration"] > _WARM_UP]
    shape = read_model_directory(folder / "run" / "model", label="the calibration's model").shape
    assert shape is not None, "a fresh model has a shape"
    return HostTiming(parameters=shape.num_parameters, ranks=ranks, seconds=statistics.median(times))
