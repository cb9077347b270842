"""Names of functions that a program passes: they name curves."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_algorithms.passed_inputs import InputFolder


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
