"""`hybridflow config --algorithm NAME` prints a file that `plan` and `train` take as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_algorithms.config import load_config
from hf_algorithms.data import load_rows
from hf_algorithms.models.initial_model import build_initial_model
from small_runs import Outcome, read_metrics


@pytest.fixture
def model(small_config: Path, tmp_path: Path) -> Path:
    """A directory with a model of 16 positions."""
    config = load_config(small_config)
    rows = load_rows(config.data.train, prompt_field="prompt", answer_field="answer")
    backends = {"training.backend": "fsdp", "rollout.backend": "transformers"}
    built = build_initial_model(config.model, rows, directory=tmp_path / "tiny", seed=0, backends=backends, on_cpu=True)
    return Path(built.path)


def starting_file(hybridflow: Callable[..., Outcome], folder: Path, *arguments: object) -> Path:
    printed = hybridflow("config", *arguments)
    assert (printed.exit_code, printed.errors) == (0, "")
    file = folder / "start.toml"
    file.write_text(printed.output)
    return file


@pytest.mark.parametrize("name", ["ppo", "grpo", "online_dpo", "remax"])
def test_a_starting_file_is_planned(
    name: str, hybridflow: Callable[..., Outcome], tmp_path: Path, addition_data: Path, model: Path
) -> None:
    options = ("--algorithm", name, "--model", model, "--data", addition_data / "train.jsonl")
    file = starting_file(hybridflow, tmp_path, *options, "--set", "rollout.max_new_tokens=5")
    outcome = hybridflow("plan", file)
    assert outcome.exit_code == 0, outcome.errors


def test_a_starting_file_with_a_fresh_model_is_planned(
    hybridflow: Callable[..., Outcome], tmp_path: Path, addition_data: Path
) -> None:
    file = starting_file(hybridflow, tmp_path, "--data", addition_data / "train.jsonl")
    outcome = hybridflow("plan", file)
    assert outcome.exit_code == 0, outcome.errors


def test_a_starting_file_is_trained(
    hybridflow: Callable[..., Outcome], tmp_path: Path, addition_data: Path, model: Path
) -> None:
    changes = {
        "run.executor": "in_process", "run.iterations": 1, "run.output_dir": tmp_path / "run", "data.max_eval_rows": 4,
        "cluster.gpus_per_machine": 1, "rollout.batch_size": 2, "rollout.max_new_tokens": 5, "training.shard": "root",
    }  # fmt: skip
    options = ("--algorithm", "grpo", "--model", model, "--data", addition_data / "train.jsonl")
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    outcome = hybridflow("train", starting_file(hybridflow, tmp_path, *options, *sets))
    assert outcome.exit_code == 0, outcome.errors
    assert read_metrics(tmp_path / "run")[0]["response/tokens"] > 0
