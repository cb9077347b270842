"""Example sets made of a copy of GSM8K: questions with answers, calculator steps, and pairs of solutions."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hf_algorithms.data._addition import ExampleFiles
from hf_algorithms.data._rows import Row, read_records, write_rows
from hf_protocols.errors import ConfigError, DataError
from hf_protocols.validation import show

__all__ = ["write_gsm8k_data", "write_gsm8k_preferences", "write_gsm8k_steps"]

Item = TypeVar("Item")

_QUESTIONS = ("train.jsonl", "`question` and `answer`")
_SOLUTIONS = ("solutions.jsonl", "`question` and, by name of a model, `{is_correct, solution}`")
_MOST_HELD_OUT = 500
_STEP = re.compile(r"<<(\d{1,2}[-+*/]\d{1,2}=)(\d+)>>")
"""A calculator annotation of one operation on whole numbers below 100 whose result is a whole number, too."""


def write_gsm8k_data(directory: str | Path, *, source: str | Path | None, seed: int = 0) -> ExampleFiles:
    """Writes `train.jsonl`, `validation.jsonl` and `test.jsonl` with a `question` and its worked `answer`.

    Rows for validation and test are drawn by the seed from those of the source: a tenth for each, at most 500.

    Args:
        directory: to write to.
        source: folder with `train.jsonl` of the grade-school-math repository; this package has no copy.
        seed: of the draw.

    Raises:
        ConfigError: without a source, naming the file that is needed.
        DataError: for a source that cannot be read, or a folder that cannot be written.
    """
    path = _find(source, "gsm8k", *_QUESTIONS)
    rows = [
        Row(_text(record, "question", where), _text(record, "answer", where)) for where, record in read_records(path)
    ]
    return _write(directory, _split(rows, seed), prompt_field="question")


def write_gsm8k_steps(directory: str | Path, *, source: str | Path | None, seed: int = 0) -> ExampleFiles:
    """Writes the same three files with a `prompt` such as `16-3=` and its `answer`: steps of the worked answers.

    They are the distinct calculator annotations, `<<16-3=13>>`, of one operation on whole numbers below 100 with a
    whole, non-negative result. A problem is in one file only.

    Args:
        directory: to write to.
        source: folder with `train.jsonl` of the grade-school-math repository; this package has no copy.
        seed: of the draw.

    Raises:
        ConfigError: without a source, naming the file that is needed.
        DataError: for a source that cannot be read, or a folder that cannot be written.
    """
    path = _find(source, "gsm8k-steps", *_QUESTIONS)
    steps = {
        prompt: answer
        for where, record in read_records(path)
        for prompt, answer in _STEP.findall(_text(record, "answer", where))
    }
    rows = [Row(prompt, answer) for prompt, answer in steps.items()]
    return _write(directory, _split(rows, seed), prompt_field="prompt")


def write_gsm8k_preferences(directory: str | Path, *, source: str | Path | None, seed: int = 0) -> ExampleFiles:
    """Writes the same three files with `prompt`, `chosen` and `rejected`: a right and a wrong solution of a question.

    Every right solution is paired with every wrong one. All pairs of a question are in one file.

    Args:
        directory: to write to.
        source: folder with `solutions.jsonl`, made of the solutions of that repository; this package has no copy.
        seed: of the draw.

    Raises:
        ConfigError: without a source, naming the file that is needed.
        DataError: for a source that cannot be read, or a folder that cannot be written.
    """
    path = _find(source, "gsm8k-preferences", *_SOLUTIONS)
    questions = [pairs for where, record in read_records(path) if (pairs := list(_pair(record, where)))]
    parts = [[pair for pairs in part for pair in pairs] for part in _split(questions, seed)]
    return _write(directory, parts, prompt_field="prompt")


def _find(source: str | Path | None, name: str, file: str, fields: str) -> Path:
    wanted = f"{file} of the grade-school-math repository, one object a line with {fields}"
    if source is None:
        raise ConfigError(f"`hybridflow data {name}` needs --source DIR, a folder with {wanted}")
    path = Path(source) / file
    if not path.is_file():
        raise DataError(f"--source {source}: has no file {file}. The folder must hold {wanted}")
    return path


def _pair(record: Mapping[str, Any], where: str) -> Iterator[Row]:
    question = _text(record, "question", where)
    judged = [
        each for each in record.values() if isinstance(each, Mapping) and {"is_correct", "solution"} <= each.keys()
    ]
    right = dict.fromkeys(_text(each, "solution", where) for each in judged if each["is_correct"])
    wrong = dict.fromkeys(_text(each, "solution", where) for each in judged if not each["is_correct"])
    for chosen in right:
        yield from (Row(question, None, {"chosen": chosen, "rejected": rejected}) for rejected in wrong)


def _split(items: Sequence[Item], seed: int) -> list[list[Item]]:
    """Rows to train on, to validate and to test."""
    order = list(items)
    random.Random(seed).shuffle(order)
    held_out = min(_MOST_HELD_OUT, len(order) // 10)
    if not held_out:
        raise DataError(f"the source has {len(order)} usable questions, and at least 10 are needed. Use a larger one")
    return [order[2 * held_out :], order[:held_out], order[held_out : 2 * held_out]]


def _write(directory: str | Path, parts: Sequence[Sequence[Row]], *, prompt_field: str) -> ExampleFiles:
    names = ("train", "validation", "test")
    paths = [
        write_rows(Path(directory) / f"{name}.jsonl", part, prompt_field=prompt_field)
        for name, part in zip(names, parts, strict=True)
    ]
    return ExampleFiles(train=paths[0], validation=paths[1], test=paths[2])


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: field {show(field)} is {show(value)}, not a text. Fetch the file again")
    return value
