"""Sequences of digits to go on with, of which a third is hardly known: one response each, every digit counts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

from learning_tasks import ADDITION_MODEL, build_in_process

from hf_algorithms.data import Row, write_rows

__all__ = ["RIGHT_SHARES", "build_completion", "share_of_digits", "write_completion"]

RIGHT_SHARES: Mapping[int, float] = {1: 1.0, 2: 1.0, 3: 0.3}
"""By the step from digit to digit: probability that a digit is right, in the rows that the warm start learns."""

_MODULUS = 10
_NUM_SHOWN = 3
_NUM_WANTED = 8


def share_of_digits(prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Rewards the digits at their places in what goes on with the prompt's sequence: 0 to 1."""
    return [_count_right(*pair) / _NUM_WANTED for pair in zip(prompts, responses, strict=True)]


def write_completion(directory: Path) -> None:
    """Writes rows whose answers have wrong digits in known shares, and every prompt with its true sequence."""
    write_rows(directory / "train.jsonl", islice(_draw_rows(random.Random(0)), 8000))
    prompts = [_show(*each) for each in product(range(_MODULUS), RIGHT_SHARES)]
    for name in ("validation", "test"):
        write_rows(directory / f"{name}.jsonl", [Row(prompt, _continue(prompt)) for prompt in prompts])


def build_completion(data: Path, algorithm: Mapping[str, Any], *, seed: int, iterations: int) -> dict[str, Any]:
    """Returns a configuration for the completion of digits; arguments as of `build_addition`."""
    reward = f"{__name__}:{share_of_digits.__name__}"
    body = build_in_process(data, ADDITION_MODEL, algorithm, seed=seed, iterations=iterations)
    return {
        **body,
        "run": {**body["run"], "eval_every": 50},
        "warm_start": {"max_steps": 400, "learning_rate": 3e-3, "batch_size": 128, "eval_every": 400},
        "optimizer": {"actor_learning_rate": 3e-4, "critic_learning_rate": 1e-3},
        "rollout": {"batch_size": 32, "max_new_tokens": _NUM_WANTED + 2},
        "reward": {"function": reward, "metric": reward},
    }


def _show(first: int, step: int) -> str:
    return "".join(str((first + place * step) % _MODULUS) for place in range(_NUM_SHOWN)) + "="


def _continue(prompt: str) -> str:
    first, step = int(prompt[0]), _step_of(prompt)
    places = range(_NUM_SHOWN, _NUM_SHOWN + _NUM_WANTED)
    return "".join(str((first + place * step) % _MODULUS) for place in places)


def _step_of(prompt: str) -> int:
    return (int(prompt[1]) - int(prompt[0])) % _MODULUS


def _count_right(prompt: str, response: str) -> int:
    return sum(given == wanted for given, wanted in zip(response, _continue(prompt), strict=False))


def _draw_rows(random_: random.Random) -> Iterator[Row]:
    while True:
        prompt = _show(random_.randrange(_MODULUS), random_.choice(tuple(RIGHT_SHARES)))
        share = RIGHT_SHARES[_step_of(prompt)]
        yield Row(prompt, "".join(_slip(digit, share, random_) for digit in _continue(prompt)))


def _slip(digit: str, right_share: float, random_: random.Random) -> str:
    if random_.random() < right_share:
        return digit
    return str((int(digit) + random_.randrange(1, _MODULUS)) % _MODULUS)
