"""Runs, evaluations and generations on several threads of one program: each does what it does alone, or is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_algorithms import TrainingResult, evaluate, generate, train
from hf_protocols import ConfigError

MODEL = {
    "tokenizer": "characters",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_heads": 1,
    "max_positions": 16,
}
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]


def run_grpo(output_dir: Path, reward: Callable[..., list[float]]) -> TrainingResult:
    settings = {
        "run.executor": "in_process",
        "run.output_dir": str(output_dir),
        "run.iterations": 2,
        "run.eval_every": 2,
        "rollout.batch_size": 4,
        "rollout.samples_per_prompt": 2,
        "rollout.max_new_tokens": 4,
    }
    return train(model=MODEL, dataset=ROWS, reward=reward, algorithm="grpo", set=settings)


def list_metrics(run: TrainingResult) -> list[dict[str, Any]]:
    """Without times, and without those that have the name of the reward function."""
    named = ("time/", "perf/", "memory/", "reward/rate_length/", "reward/reward_0/")
    return [{name: value for name, value in row.items() if not name.startswith(named)} for row in run.metrics]


def rate_length(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(each)) for each in completions]


def start_threads(**functions: Callable[[], Any]) -> tuple[dict[str, Any], list[threading.Thread]]:
    """Results, or errors, by name, which are complete when the threads have ended."""
    found: dict[str, Any] = {}

    def keep(name: str, function: Callable[[], Any]) -> None:
        try:
            found[name] = function()
        except ConfigError as error:
            found[name] = str(error)

    threads = [threading.Thread(target=keep, args=each) for each in functions.items()]
    for thread in threads:
        thread.start()
    return found, threads


def end_threads(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    return run_grpo(tmp_path_factory.mktemp("alone") / "run", rate_length)


def test_a_second_run_is_refused_and_does_not_change_the_first(alone: TrainingResult, tmp_path: Path) -> None:
    is_inside, may_end = threading.Event(), threading.Event()

    def rate_in_here(completions: list[str], **_: Any) -> list[float]:
        is_inside.set()
        assert may_end.wait(60)
        return rate_length(completions)

    found, threads = start_threads(first=lambda: run_grpo(tmp_path / "first", rate_in_here))
    assert is_inside.wait(60)
    with pytest.raises(ConfigError, match=r"^another thread of this process is training.*Train after it ends, or in"):
        run_grpo(tmp_path / "second", rate_length)
    may_end.set()
    end_threads(threads)
    assert list_metrics(found["first"]) == list_metrics(alone)
    assert not list(tmp_path.glob("second*"))
    assert list_metrics(run_grpo(tmp_path / "second", rate_length)) == list_metrics(alone)


def test_evaluations_next_to_a_run_find_what_they_find_alone(alone: TrainingResult, tmp_path: Path) -> None:
    def judge(seed: int) -> list[dict[str, Any]]:
        def score(completions: list[str], **_: Any) -> list[float]:
            return [seed + len(each) / 100 for each in completions]

        return evaluate(alone, data=ROWS, metrics=score, max_new_tokens=4, samples=4, seed=seed).metrics

    def draw(seed: int) -> str:
        output = tmp_path / f"{threading.get_ident()}-{seed}.jsonl"
        generate(alone, data=ROWS, output=output, max_new_tokens=4, temperature=1.0, seed=seed)
        return output.read_text()

    functions = {
        "judge 1": lambda: judge(1),
        "judge 2": lambda: judge(2),
        "draw 1": lambda: draw(1),
        "draw 2": lambda: draw(2),
    }
    expected = {name: function() for name, function in functions.items()}
    assert len({str(each) for each in expected.values()}) == len(expected)
    run = {"run": lambda: list_metrics(run_grpo(tmp_path / "run", rate_length))}
    found, threads = start_threads(**run, **functions)
    end_threads(threads)
    assert found == {"run": list_metrics(alone)} | expected
