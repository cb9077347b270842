"""Tasks on which algorithms are seen to learn: addition, and a text whose reward and cost pull apart."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hf_algorithms.data import Row, write_rows
from hf_algorithms.rewards import exact_match

ADDITION_MODEL: Mapping[str, Any] = {
    "tokenizer": "characters",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_layers": 2,
    "num_heads": 4,
    "max_positions": 16,
}
"""Of a hundred thousand parameters."""
TEXT_MODEL: Mapping[str, Any] = {
    "tokenizer": "characters",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_heads": 1,
    "max_positions": 16,
}
COST_LIMIT = 0.3
"""Of `share_of_doubles`, in the constrained text."""

_WANTED = "1"
_LENGTH = 5
_shuffler = random.Random(0)


def share_of_ones(prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Rewards every "1" of a response, 0 to 1."""
    return [response.count(_WANTED) / _LENGTH for response in responses]


def share_of_doubles(prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Costs of a "1" that follows a "1", 0 to 1: the most rewarded response is the most costly."""
    return [sum(pair == (_WANTED, _WANTED) for pair in pairwise(response)) / (_LENGTH - 1) for response in responses]


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
        **_build(data, ADDITION_MODEL, algorithm, seed=seed, iterations=iterations),
        "warm_start": {"max_steps": 1000, "learning_rate": 3e-3, "stop_at": 0.35, "fail_above": 0.6},
        "optimizer": {"actor_learning_rate": 5e-4, "critic_learning_rate": 1e-3, "warmup_steps": 10},
        "rollout": {"batch_size": 256 // samples, "samples_per_prompt": samples, "max_new_tokens": 4},
    }


def build_constrained_text(data: Path, algorithm: Mapping[str, Any], *, seed: int, iterations: int) -> dict[str, Any]:
    """Returns a configuration for the constrained text; arguments as of `build_addition`."""
    module = __name__
    body = _build(data, TEXT_MODEL, algorithm, seed=seed, iterations=iterations)
    body["data"]["max_eval_rows"] = 32
    return {
        **body,
        "warm_start": {"max_steps": 40, "learning_rate": 3e-3, "batch_size": 64, "eval_every": 40},
        "optimizer": {"actor_learning_rate": 2e-3, "critic_learning_rate": 1e-2},
        "rollout": {"batch_size": 64, "max_new_tokens": _LENGTH},
        "reward": {"function": f"{module}:share_of_ones", "metric": f"{module}:share_of_ones"},
        "cost": {"function": f"{module}:share_of_doubles"},
    }


def _build(
    data: Path, model: Mapping[str, Any], algorithm: Mapping[str, Any], *, seed: int, iterations: int
) -> dict[str, Any]:
    files = {name: str(data / f"{name}.jsonl") for name in ("train", "validation", "test")}
    return {
        "run": {"seed": seed, "iterations": iterations, "executor": "in_process"},
        "data": {**files},
        "model": dict(model),
        "algorithm": dict(algorithm),
        "training": {"shard": "root"},
        "cluster": {"gpus_per_machine": 1},
    }
