"""Tasks on which two algorithms differ as their theory says: data, rewards and configurations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from hf_algorithms.data import Row, write_rows

SMALL_MODEL: Mapping[str, Any] = {
    "tokenizer": "characters",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_heads": 2,
    "max_positions": 20,
}
"""Of ten thousand parameters."""

EASY, HARD, SURE = 0.5, 0.02, 0.98
"""Share of right answers in the rows that the warm start learns, by kind of prompt."""

_DIGITS = "0123456789"
_LONGEST = 12


def is_right_digit(prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Rewards a response that is the digit belonging to the prompt."""
    return [float(response == _right_digit(prompt)) for prompt, response in zip(prompts, responses, strict=True)]


def has_right_parity(prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Rewards a response whose first character says if the prompt's digit is even; its length does not matter."""
    return [
        float(response[:1] == "eo"[int(prompt[0]) % 2]) for prompt, response in zip(prompts, responses, strict=True)
    ]


def write_task_data(directory: Path) -> None:
    """Writes the rows of every task. The warm start learns their answers, of which a known share is right."""
    random_ = random.Random(0)
    kinds = {"mixture": (EASY, HARD), "extremes": (HARD, SURE, HARD, SURE)}
    for name, shares in kinds.items():
        write_rows(
            directory / f"{name}.jsonl", islice(_digit_rows(random_, shares, has_one_wrong=name == "extremes"), 4000)
        )
        prompts = dict.fromkeys(row.prompt for row in _digit_rows_once(shares))
        write_rows(directory / f"{name}-test.jsonl", [Row(prompt, _right_digit(prompt)) for prompt in prompts])
    write_rows(directory / "parity.jsonl", islice(_parity_rows(random_), 4000))
    write_rows(directory / "parity-test.jsonl", [Row(f"{digit}=", "eo"[digit % 2]) for digit in range(10)])


def _digit_rows_once(shares: Sequence[float]) -> Iterator[Row]:
    return islice(_digit_rows(random.Random(0), shares), 10 * len(shares))


def _digit_rows(random_: random.Random, shares: Sequence[float], *, has_one_wrong: bool = False) -> Iterator[Row]:
    """Endless rows; row i is of kind i modulo the number of kinds, and its answer is right in that kind's share.

    Wrong answers are any other digits, or always the same one of a prompt.
    """
    letters = "abcde"
    for number, (kind, share) in enumerate(cycle(enumerate(shares))):
        prompt = f"{letters[kind]}{number // len(shares) % 10}="
        right = _right_digit(prompt)
        wrong = _DIGITS[(int(right) + 5) % 10] if has_one_wrong else random_.choice(_DIGITS.replace(right, ""))
        yield Row(prompt, right if random_.random() < share else wrong)


def _right_digit(prompt: str) -> str:
    return _DIGITS[(7 * int(prompt[1]) + 3 * ord(prompt[0])) % 10]


def _parity_rows(random_: random.Random) -> Iterator[Row]:
    """Endless rows: the right parity alone, or the wrong one and dots, whose number is geometric with mean 2."""
    while True:
        dots = 0
        while dots < _LONGEST - 2 and random_.random() < 2 / 3:
            dots += 1
        digit, answer = random_.randrange(10), random_.choice("eo")
        yield Row(f"{digit}=", answer if answer == "eo"[digit % 2] else answer + "." * dots)


@dataclass(frozen=True, kw_only=True)
class _SeparatingTask:
    reward: str
    learning_rate: float
    batch_size: int
    max_new_tokens: int
    warm_steps: int
    rows: str


_DIGIT_TASK = _SeparatingTask(
    reward="is_right_digit", learning_rate=2e-3, batch_size=20, max_new_tokens=3, warm_steps=300, rows="mixture"
)
_TASKS = {
    "mixture": _DIGIT_TASK,
    "stale": _DIGIT_TASK,
    "extremes": replace(_DIGIT_TASK, batch_size=8, rows="extremes"),
    "parity": _SeparatingTask(
        reward="has_right_parity",
        learning_rate=1e-3,
        batch_size=16,
        max_new_tokens=_LONGEST,
        warm_steps=150,
        rows="parity",
    ),
}


def build_task(data: Path, algorithm: Mapping[str, Any], *, task: str, seed: int, iterations: int) -> dict[str, Any]:
    """Returns the configuration of a task by one rank in the program, with eight responses to a prompt.

    Args:
        data: folder of `write_task_data`.
        algorithm: the `[algorithm]` section.
        task: `mixture`, `stale`, `extremes` or `parity`.
        seed: of the run.
        iterations: of the algorithm.
    """
    chosen = _TASKS[task]
    reward = f"{__name__}:{chosen.reward}"
    steps = chosen.warm_steps
    return {
        "run": {"seed": seed, "iterations": iterations, "executor": "in_process", "eval_every": 5},
        "data": {"train": str(data / f"{chosen.rows}.jsonl"), "validation": str(data / f"{chosen.rows}-test.jsonl")},
        "model": dict(SMALL_MODEL),
        "algorithm": dict(algorithm),
        "warm_start": {"max_steps": steps, "learning_rate": 3e-3, "batch_size": 128, "eval_every": steps},
        "optimizer": {"actor_learning_rate": chosen.learning_rate, "critic_learning_rate": 3e-3},
        "rollout": {
            "batch_size": chosen.batch_size,
            "samples_per_prompt": 8,
            "max_new_tokens": chosen.max_new_tokens,
        },
        "reward": {"function": reward, "metric": reward},
        "training": {"shard": "root"},
        "cluster": {"gpus_per_machine": 1},
    }
