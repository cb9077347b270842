"""Addition, on which algorithms are seen to learn: data, rewards and configurations."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_algorithms.data import Row, write_rows
from hf_algorithms.rewards import exact_match

__all__ = ["ADDITION_MODEL", "build_addition", "build_in_process", "shuffled_exact_match", "write_small_addition"]

ADDITION_MODEL: Mapping[str, Any] = {
    "tokenizer": "characters",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_layers": 2,
    "num_heads": 4,
    "max_positions": 16,
}
"""Of a hundred thousand parameters."""

_shuffler = random.Random(0)


def shuffled_exact_match(prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Scores of addition, each given to another response: there is nothing to learn."""
    scores = exact_match(prompts, responses, answers)
    _shuffler.shuffle(scores)
    return scores


def write_small_addition(directory: Path) -> None:
    """Writes sums of a number below 100 and one below 10: 700 rows to train, 100 to validate and 200 to test."""
    rows = [Row(f"{a}+{b}=", str(a + b)) for a in range(100) for b in range(10)]
    random.Random(0).shuffle(rows)
    parts = {"train": rows[:700], "validation": rows[700:800], "test": rows[800:]}
    for name, part in parts.items():
        write_rows(directory / f"{name}.jsonl", part)


def build_addition(data: Path, algorithm: Mapping[str, Any], *, seed: int, iterations: int) -> dict[str, Any]:
    """Returns a configuration for addition by one rank in the program, 256 completions an iteration.

    Args:
        data: folder of `write_small_addition`.
        algorithm: the `[algorithm]` section.
        seed: of the run.
        iterations: of the algorithm.
    """
    samples = 1 if algorithm["name"] in ("ppo", "remax", "reinforce_pp") else 8
    return {
        **build_in_process(data, ADDITION_MODEL, algorithm, seed=seed, iterations=iterations),
        "warm_start": {"max_steps": 1000, "learning_rate": 3e-3, "stop_at": 0.35, "fail_above": 0.6},
        "optimizer": {"actor_learning_rate": 5e-4, "critic_learning_rate": 1e-3, "warmup_steps": 10},
        "rollout": {"batch_size": 256 // samples, "samples_per_prompt": samples, "max_new_tokens": 4},
    }


def build_in_process(
    data: Path, model: Mapping[str, Any], algorithm: Mapping[str, Any], *, seed: int, iterations: int
) -> dict[str, Any]:
    """Returns the sections that all tasks by one rank in the program share, without any of `[optimizer]`.

    Args:
        data: folder with `train.jsonl`, `validation.jsonl` and `test.jsonl`.
        model: the `[model]` section.
        algorithm: the `[algorithm]` section.
        seed: of the run.
        iterations: of the algorithm.
    """
    files = {name: str(data / f"{name}.jsonl") for name in ("train", "validation", "test")}
    return {
        "run": {"seed": seed, "iterations": iterations, "executor": "in_process"},
        "data": files,
        "model": dict(model),
        "algorithm": dict(algorithm),
        "training": {"shard": "root"},
        "cluster": {"gpus_per_machine": 1},
    }
