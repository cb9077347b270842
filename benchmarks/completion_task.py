"""Sequences of digits to go on with: a slip ends the response, and costs all digits that would have followed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product, takewhile
from pathlib import Path
from typing import Any

from learning_tasks import ADDITION_MODEL, build_in_process

from hf_algorithms.data import Row, write_rows

__all__ = ["RIGHT_SHARE", "build_completion", "share_of_digits", "write_completion"]

RIGHT_SHARE = 0.8
"""Probability that the next digit is right, in the rows that the warm start learns."""

_MODULUS = 10
_STEPS = (1, 2, 3)
_NUM_SHOWN = 3
_NUM_WANTED = 8
_SLIPPED = "?"


def share_of_digits(prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Rewards the digits that go on with the prompt's sequence, up to the first wrong one: 0 to 1."""
    return [_count_right(*pair) / _NUM_WANTED for pair in zip(prompts, responses, strict=True)]


def write_completion(directory: Path) -> None:
    """Writes rows whose answers end after a slip, with a question mark, and every prompt with its whole sequence."""
    write_rows(directory / "train.jsonl", islice(_draw_rows(random.Random(0)), 8000))
    prompts = [_show(*each) for each in product(range(_MODULUS), _STEPS)]
    for name in ("validation", "test"):
        write_rows(directory / f"{name}.jsonl", [Row(prompt, _continue(prompt)) for prompt in prompts])


def build_completion(data: Path, algorithm: Mapping[str, Any], *, seed: int, iterations: int) -> dict[str, Any]:
    """Returns a configuration for the completion of digits; arguments as of `build_addition`."""
    reward = f"{__name__}:{share_of_digits.__name__}"
    body = build_in_process(data, ADDITION_MODEL, algorithm, seed=seed, iterations=iterations)
    return {
        **body,
        "run": {**body["run"], "eval_every": 30},
        "warm_start": {"max_steps": 400, "learning_rate": 3e-3, "batch_size": 128, "eval_every": 400},
        "optimizer": {"actor_learning_rate": 1e-3, "critic_learning_rate": 3e-3},
        "rollout": {"batch_size": 32, "max_new_tokens": _NUM_WANTED + 2},
        "reward": {"function": reward, "metric": reward},
    }


def _show(first: int, step: int) -> str:
    return "".join(str((first + place * step) % _MODULUS) for place in range(_NUM_SHOWN)) + "="


def _continue(prompt: str) -> str:
    first, second = int(prompt[0]), int(prompt[1])
    places = range(_NUM_SHOWN, _NUM_SHOWN + _NUM_WANTED)
    return "".join(str((first + place * (second - first)) % _MODULUS) for place in places)


def _count_right(prompt: str, response: str) -> int:
    pairs = zip(response, _continue(prompt), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _draw_rows(random_: random.Random) -> Iterator[Row]:
    while True:
        prompt = _show(random_.randrange(_MODULUS), random_.choice(_STEPS))
        yield Row(prompt, _slip(_continue(prompt), random_))


def _slip(answer: str, random_: random.Random) -> str:
    for place, digit in enumerate(answer):
        if random_.random() >= RIGHT_SHARE:
            wrong = (int(digit) + random_.randrange(1, _MODULUS)) % _MODULUS
            return f"{answer[:place]}{wrong}{_SLIPPED}"
    return answer
