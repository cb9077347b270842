"""`hybridflow plan` and `train` with models of families whose parameters the mapper does not know by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_algorithms.data import build_character_tokenizer
from hf_engine.testing import write_tiny_family
from hf_protocols import MappingPlan
from small_runs import Outcome, read_metrics


@pytest.fixture
def address(request: pytest.FixtureRequest, executor: str) -> str:
    """Of the cluster, which is started only for a run on it."""
    return request.getfixturevalue("cluster_address") if executor == "ray" else "local"


def write_model(directory: Path, family: str, **config: Any) -> Path:
    write_tiny_family(directory, family, vocab_size=20, eos_token_id=1, **config)
    build_character_tokenizer("0123456789+=", directory)
    return directory


def starting_file(hybridflow: Callable[..., Outcome], folder: Path, model: Path, data: Path, **changes: Any) -> Path:
    settings = {
        "run.iterations": 1,
        "run.output_dir": folder / "run",
        "data.max_eval_rows": 4,
        "rollout.batch_size": 4,
        "rollout.max_new_tokens": 5,
        "training.shard": "root",
        "reward.function": "small_runs:response_length",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    printed = hybridflow("config", "--algorithm", "ppo", "--model", model, "--data", data / "train.jsonl", *sets)
    assert printed.exit_code == 0, printed.errors
    (folder / "start.toml").write_text(printed.output)
    return folder / "start.toml"


@pytest.mark.parametrize(
    ("family", "executor", "ranks"),
    [("gemma2", "in_process", 1), pytest.param("phi", "ray", 2, marks=pytest.mark.slow)],
    ids=["gemma2", "phi"],
)
def test_a_family_without_a_known_shape_is_planned_and_trained(
    hybridflow: Callable[..., Outcome],
    tmp_path: Path,
    addition_data: Path,
    family: str,
    executor: str,
    ranks: int,
    address: str,
) -> None:
    model = write_model(tmp_path / "model", family)
    changes = {"run__executor": executor, "cluster__gpus_per_machine": ranks, "cluster__address": address}
    config = starting_file(hybridflow, tmp_path, model, addition_data, **changes)
    planned = hybridflow("plan", config, "--json")
    assert planned.exit_code == 0, planned.errors
    note = f"actor, critic, reference: planned with a generic shape, the sizes of the {family} that transformers builds"
    assert planned.errors.splitlines() == [note]
    assert MappingPlan.from_json(planned.output).models["actor"].backend == "fsdp"
    outcome = hybridflow("train", config)
    assert outcome.exit_code == 0, outcome.errors
    assert outcome.output.count(note) == 1
    (metrics,) = read_metrics(tmp_path / "run")
    assert metrics["response/tokens"] > 0
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert trained.keys() == before.keys()
    assert any(not trained[name].equal(before[name]) for name in trained)
    assert (
        load_file(tmp_path / "run" / "model" / "model.safetensors").keys()
        == load_file(model / "model.safetensors").keys()
    )


def test_a_recurrent_model_is_one_line_before_anything_starts(
    hybridflow: Callable[..., Outcome], tmp_path: Path, addition_data: Path
) -> None:
    model = write_model(tmp_path / "model", "llama")
    path = model / "config.json"
    config = {"model_type": "mamba", "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 20}
    path.write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    for command in ("plan", "train"):
        outcome = hybridflow(command, starting_file(hybridflow, tmp_path, model, addition_data))
        assert outcome.exit_code == 2
        (line,) = outcome.errors.splitlines()
        assert "is a MambaForCausalLM, with recurrent layers" in line
    assert not (tmp_path / "run").exists()
