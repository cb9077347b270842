"""Adding two numbers: a data set whose answers are checkable and that a model of a million parameters can learn."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hf_algorithms.data._rows import Row, write_rows

__all__ = ["ExampleFiles", "write_addition_data"]

_LARGEST_OPERAND = 99
_NUM_TEST = 500
_NUM_VALIDATION = 300


@dataclass(frozen=True, kw_only=True)
class ExampleFiles:
    """The files that `write_addition_data` and its neighbours write."""

    train: Path
    validation: Path
    test: Path


def write_addition_data(directory: str | Path, *, seed: int) -> ExampleFiles:
    """Writes `train.jsonl`, `validation.jsonl` and `test.jsonl` of problems like `37+85=` with answer `122`.

    Operands run from 0 to 99. The split is by unordered pair, so that `85+37` never reveals the answer of
    a held-out `37+85`: of the 5,050 pairs 500 are test problems and 300 validation problems, each in one orientation;
    the other 4,250 train, in both orientations. The same seed writes the same bytes.

    Raises:
        DataError: when the folder cannot be written.
    """
    generator = random.Random(seed)
    pairs = [(a, b) for a in range(_LARGEST_OPERAND + 1) for b in range(a, _LARGEST_OPERAND + 1)]
    generator.shuffle(pairs)
    held_out = [pair if generator.random() < 0.5 else pair[::-1] for pair in pairs[: _NUM_TEST + _NUM_VALIDATION]]
    train = [oriented for a, b in pairs[_NUM_TEST + _NUM_VALIDATION :] for oriented in {(a, b): 0, (b, a): 0}]
    generator.shuffle(train)

    directory = Path(directory)
    return ExampleFiles(
        train=write_rows(directory / "train.jsonl", _problems(train)),
        validation=write_rows(directory / "validation.jsonl", _problems(held_out[_NUM_TEST:])),
        test=write_rows(directory / "test.jsonl", _problems(held_out[:_NUM_TEST])),
    )


def _problems(pairs: Iterable[tuple[int, int]]) -> list[Row]:
    return [Row(prompt=f"{a}+{b}=", answer=str(a + b)) for a, b in pairs]
