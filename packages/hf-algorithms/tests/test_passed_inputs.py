"""Names of functions that a program passes: they name curves."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_algorithms.passed_inputs import InputFolder, are_texts
from hf_protocols import ConfigError, DataError


class LengthReward:
    """An object that is called; another one cannot be pickled."""

    def __init__(self, lock: Any = None) -> None:
        self.lock = lock

    def __call__(self, responses: list[str], **_: Any) -> list[float]:
        return [float(len(each)) for each in responses]

    def short(self, responses: list[str], **_: Any) -> list[float]:
        return [-float(len(each)) for each in responses]


class HTTPReward(LengthReward):
    """Its name begins with an abbreviation."""


def length(responses: list[str], scale: float = 1.0, **_: Any) -> list[float]:
    return [scale * len(each) for each in responses]


def name_list(folder: Path, *functions: Any) -> list[str]:
    inputs = InputFolder(folder)
    return [each["name"] for each in inputs.name_reward([*functions], is_in_process=True)["functions"]]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (length, "length"),
        (LengthReward(), "length_reward"),
        (LengthReward(threading.Lock()), "length_reward"),
        (HTTPReward(), "http_reward"),
        (LengthReward().short, "short"),
        (partial(length, scale=2.0), "length"),
        (partial(LengthReward()), "length_reward"),
        (lambda responses, **_: [0.0], "function_1"),
        ("my_rewards:style", "style"),
    ],
)
def test_a_curve_has_the_name_of_its_function_or_class(tmp_path: Path, function: Any, name: str) -> None:
    assert name_list(tmp_path, function) == [name]


def test_names_of_a_list_are_unique(tmp_path: Path) -> None:
    """A numbered name may be that of another function."""
    assert name_list(tmp_path, length, LengthReward(), length, LengthReward()) == [
        "length", "length_reward", "length_3", "length_reward_4",
    ]  # fmt: skip

    def length_3(responses: list[str], **_: Any) -> list[float]:
        return [0.0]

    assert name_list(tmp_path, length, length_3, length) == ["length", "length_3", "length_4"]


def test_a_single_object_is_named_by_its_class(tmp_path: Path) -> None:
    inputs = InputFolder(tmp_path)
    keys = inputs.name_reward(HTTPReward(), is_in_process=True)
    assert keys == {"function": f"{tmp_path / 'passed_reward.py'}:http_reward"}
    body: dict[str, Any] = {"reward": {"metric": LengthReward()}}
    inputs.name_values(body, is_in_process=True)
    assert body["reward"]["metric"] == f"{tmp_path / 'passed_length_reward.py'}:length_reward"


def nest(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize("value", [np.int64(3), torch.ones(2), {"a": {1}}, b"text", nest(5000)])
def test_a_value_that_no_file_holds_is_named(tmp_path: Path, value: Any) -> None:
    rows = [{"prompt": "1"}, {"prompt": "2", "extra": value, "answer": "2"}]
    with pytest.raises(DataError, match=r"^dataset 'train', row 2: column 'extra': .*\. Convert the column to texts"):
        InputFolder(tmp_path / "inputs").name_data(rows)


class BrokenRows(list[Any]):
    """Rows of a user's own class, whose second row cannot be read."""

    def __iter__(self) -> Any:
        yield self[0]
        raise KeyError("broken")


class UncountedRows(list[Any]):
    def __len__(self) -> int:
        raise OSError("gone")


@pytest.mark.parametrize(("rows", "after"), [(BrokenRows, 1), (UncountedRows, 0)])
def test_rows_that_raise_are_one_error(tmp_path: Path, rows: Any, after: int) -> None:
    message = rf"row {after + 1} cannot be read: (Key|OS)Error: .*\n  at {__file__}:\d+, in __(iter|len)__: "
    with pytest.raises(DataError, match=f"^dataset 'train': {message}"):
        InputFolder(tmp_path / "inputs").name_data(rows([{"prompt": "1"}] * 2))


TEXTS = ["1+1=", "2+2="]


@pytest.mark.parametrize("dataset", [TEXTS, tuple(TEXTS), np.array(TEXTS), {"train": TEXTS, "test": TEXTS}])
def test_prompts_alone_are_known_in_every_form(tmp_path: Path, dataset: Any) -> None:
    assert set(InputFolder(tmp_path / "inputs").name_data(dataset, text_column="prompt")) <= {"train", "test"}
    assert are_texts(dataset)


@pytest.mark.parametrize("dataset", [None, "a.jsonl", Path("a.jsonl"), [{"prompt": "1"}], {"train": "a.jsonl"}])
def test_rows_and_paths_are_not_prompts_alone(dataset: Any) -> None:
    assert not are_texts(dataset)


def test_names_that_are_equal_as_texts_are_refused(tmp_path: Path) -> None:
    """The later one would take the place of the other, which nobody would miss."""
    inputs = InputFolder(tmp_path / "inputs")
    with pytest.raises(ConfigError, match=r"^reward: two of its names are '1' as texts\. Rename one$"):
        inputs.name_reward({1: length, "1": length}, is_in_process=True)
    with pytest.raises(ConfigError, match=r"^metrics: two of its names are '1' as texts"):
        inputs.name_metrics({1: length, "1": length})
    with pytest.raises(ConfigError, match=r"^data: two of its names are '2' as texts"):
        inputs.name_sets({"1": "a.jsonl", "2": "b.jsonl", 2: "c.jsonl"})
    assert inputs.name_sets({"1": "a.jsonl", 2: "b.jsonl"}) == {"1": "a.jsonl", "2": "b.jsonl"}
