"""Common parts of the tests of small runs: the configuration, the outcome of a command, and its metrics."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALL_RUN = """
[run]
output_dir = "{output}"
iterations = 2
eval_every = 1
executor = "in_process"
[data]
train = "{data}/train.jsonl"
validation = "{data}/validation.jsonl"
test = "{data}/test.jsonl"
max_eval_rows = 16
[model]
tokenizer = "characters"
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 1
max_positions = 16
[warm_start]
max_steps = 4
batch_size = 16
eval_every = 2
[optimizer]
actor_learning_rate = 1e-4
critic_learning_rate = 1e-3
[rollout]
batch_size = 8
max_new_tokens = 5
[reward]
function = "small_runs:response_length"
[training]
shard = "root"
[cluster]
gpus_per_machine = 1
"""


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    exit_code: int
    output: str
    errors: str


def read_samples(run: Path, iteration: int, name: str = "test") -> list[dict[str, Any]]:
    """The samples of a set in `samples/<iteration>.jsonl`."""
    lines = (run / "samples" / f"{iteration}.jsonl").read_text().splitlines()
    return [sample for sample in map(json.loads, lines) if sample["set"] == name]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The objects of `metrics.jsonl`."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_times(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics less those that differ between equal runs, and between layouts: how rows were packed is `batch/`."""
    measured = ("time/", "perf/", "memory/", "checkpoint/", "batch/")
    return [{name: row[name] for name in row if not name.startswith(measured)} for row in metrics]


def write_sft(small_config: Path) -> Path:
    """Writes a configuration of two updates next to another one; returns its path."""
    text = small_config.read_text()
    before = {name: text.partition(f"[{name}]\n")[2].partition("[")[0] for name in ("run", "data", "model", "training")}
    sections = "".join(f"[{name}]\n{body}" for name, body in before.items())
    path = small_config.with_name("sft.toml")
    path.write_text(sections + "[cluster]\ngpus_per_machine = 1\n[algorithm]\nbatch_size = 8\n")
    return path


def nothing(responses: list[str]) -> list[float]:
    """A reward that is the same for all responses."""
    return [0.0] * len(responses)


def response_length(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """A reward that differs between the responses of an untrained model, so that there is something to learn."""
    return [len(response) / 5 for response in responses]
