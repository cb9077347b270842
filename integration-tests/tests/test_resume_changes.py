"""A run that resumes with other keys, with a function of its program, or with nothing left to do."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_algorithms import train
from hf_algorithms.config import load_config
from hf_algorithms.data import RowOrder, load_rows
from hf_algorithms.run_directory import ORIGIN
from hf_protocols import ConfigError, HybridFlowError
from small_runs import Outcome, read_metrics, without_times

GRPO = ("algorithm.name=grpo", "rollout.samples_per_prompt=2", "warm_start.max_steps=0", "run.checkpoint_every=1")
STARTED_WITH = ("config.toml", "plan.json", ORIGIN)


def as_words(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


@pytest.fixture
def run(small_config: Path, hybridflow: Callable[..., Outcome]) -> Path:
    """A run of two iterations, with both commits."""
    outcome = hybridflow("train", small_config, *as_words(*GRPO, "run.iterations=2", "run.eval_every=5"))
    assert outcome.exit_code == 0, outcome.errors
    return small_config.parent / "run"


def test_a_resume_that_fails_leaves_the_run_as_it_was(run: Path, hybridflow: Callable[..., Outcome]) -> None:
    before, whole = {name: (run / name).read_bytes() for name in STARTED_WITH}, run.with_name("whole")
    shutil.copytree(run, whole)
    more = as_words("run.iterations=3")
    other = [*more, *as_words("model.hidden_size=64"), "--allow-changed", "model.hidden_size"]
    outcome = hybridflow("train", "--resume", run, *other)
    assert outcome.exit_code == 1 and "state.json is of another model" in outcome.errors
    assert f"hybridflow train --resume {run} goes on after iteration 2" in outcome.output
    assert {name: (run / name).read_bytes() for name in STARTED_WITH} == before
    for each in (run, whole):
        assert hybridflow("train", "--resume", each, *more).exit_code == 0
    assert without_times(read_metrics(run)) == without_times(read_metrics(whole))
    assert (run / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()


def read_planned(run: Path) -> list[list[int]]:
    """Epoch, row and attempt of the prompts of a run, in the order of their draws."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return [prompt for line in lines if line["state"] == "planned" for prompt in line["prompts"]]


def test_smaller_batches_go_on_where_the_rows_were(run: Path, hybridflow: Callable[..., Outcome]) -> None:
    """Each row comes once in an epoch, also where the size of batches changes."""
    before = read_planned(run)
    changes = as_words("run.iterations=4", "rollout.batch_size=3", "algorithm.mini_batches=1")
    words = [word for key in ("rollout.batch_size", "algorithm.mini_batches") for word in ("--allow-changed", key)]
    outcome = hybridflow("train", "--resume", run, *changes, *words)
    assert outcome.exit_code == 0, outcome.errors
    config = load_config(run / "config.toml")
    order = RowOrder([len(load_rows(str(config.data.train)))])
    wanted = order.draw_from(0, len(before) + 6, seed=config.run.seed)
    assert read_planned(run) == [[epoch, row, 0] for epoch, row in wanted]


def test_a_run_that_was_shortened_exports_its_last_model(run: Path, hybridflow: Callable[..., Outcome]) -> None:
    shutil.rmtree(run / "steps" / "2")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "status": "running"}))  # as a killed run leaves it
    assert hybridflow("train", "--resume", run, *as_words("run.iterations=1")).exit_code == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["iterations"], summary["model_iteration"]) == ("finished", 1, 1)
    exported = load_file(run / "model/model.safetensors")
    committed = load_file(next((run / "steps/1/actor").glob("weights-*")))
    assert [name for name, weight in exported.items() if not torch.equal(weight, committed[name])] == []


def test_a_damaged_commit_is_named_in_python(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = next((run / "steps/2/actor").glob("weights-*"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    train(resume=run)
    said = " ".join(capfd.readouterr().out.split())
    assert f"warning: {weights}" in said and "It is not used" in said


def start_with_a_lock(folder: Path) -> Callable[..., list[float]]:
    """Returns the reward, which holds a lock, of a run that is stopped in its second iteration."""
    lock = threading.Lock()

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        with lock:
            return [float(len(each)) for each in responses]

    def stop(iteration: int, metrics: Any) -> None:
        if iteration == 2:
            raise KeyboardInterrupt

    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    small = {"tokenizer": "characters", "hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 1}
    changes = {
        "run.executor": "in_process", "run.iterations": 3, "run.checkpoint_every": 1, "rollout.batch_size": 4,
        "rollout.samples_per_prompt": 2, "rollout.max_new_tokens": 4,
    }  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        train(model=small, dataset=rows, reward=reward, algorithm="grpo", output_dir=folder, set=changes,
              on_metrics=stop)  # fmt: skip
    return reward


def test_a_reward_that_holds_a_lock_is_passed_again(
    tmp_path: Path, hybridflow: Callable[..., Outcome], capfd: pytest.CaptureFixture[str]
) -> None:
    reward = start_with_a_lock(tmp_path / "run")
    said = " ".join(capfd.readouterr().out.split())
    assert f"train(resume='{tmp_path / 'run'}', reward=...) with the same function goes on after iteration 1" in said
    outcome = hybridflow("train", "--resume", tmp_path / "run")
    wanted = "reward.function was a function of the program that started the run, and could not be pickled"
    assert outcome.exit_code == 2 and wanted in outcome.errors
    with pytest.raises(ConfigError, match="Pass it again in Python: train"):
        train(resume=tmp_path / "run")
    result = train(resume=tmp_path / "run", reward=reward)
    assert (result.summary["status"], len(result.metrics)) == ("finished", 3)
    with pytest.raises(HybridFlowError, match="could not be pickled"):
        train(resume=tmp_path / "run", set={"run.iterations": 4})


def test_a_reward_that_was_pickled_is_not_passed_again(run: Path) -> None:
    with pytest.raises(ConfigError, match="Leave out reward"):
        train(resume=run, reward=lambda prompts, responses: [0.0 for _ in responses])
