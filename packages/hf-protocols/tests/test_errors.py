from __future__ import annotations

import copy
import pickle
import re

import pytest

from hf_protocols import errors


def test_the_drawing_is_the_tree() -> None:
    parents, drawn = [errors.HybridFlowError], {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"^([|` -]*)(\w+Error)\b", line)
        if match and match[1]:
            depth = len(match[1]) // 4
            drawn[match[2]] = parents[depth - 1].__name__
            parents[depth:] = [getattr(errors, match[2])]
    tree = {
        name: next(base.__name__ for base in getattr(errors, name).__bases__ if base is not ValueError)
        for name in errors.__all__
        if name != "HybridFlowError"
    }
    assert drawn == tree


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_ours(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.HybridFlowError)
    assert str(error("what was given")) == "what was given"
    assert ("(also a ValueError)" in _drawn_line(name)) == issubclass(error, ValueError)


def _drawn_line(name: str) -> str:
    return next(line for line in errors.__doc__.splitlines() if re.search(rf"\b{name}\b", line))


class RowError(errors.RewardError):
    def __init__(self, row: int, *, column: str) -> None:
        super().__init__(f"row {row} is wrong in {column}")
        self.row = row


def test_an_error_is_copied_without_its_constructor() -> None:
    """Python calls the constructor with the message alone, which is wrong for one that makes the message."""
    error = RowError(3, column="x")
    error.add_note("a note")
    for found in (
        copy.copy(error),
        copy.deepcopy(error),
        *(pickle.loads(pickle.dumps(error, each)) for each in (0, 5)),
    ):
        assert type(found) is RowError
        assert (str(found), found.row, found.__notes__) == ("row 3 is wrong in x", 3, ["a note"])


def test_a_notebook_shows_one_line() -> None:
    """IPython asks an error for its lines before it makes a traceback."""
    error = errors.ConfigError("a = 1: must be 2. Set it")
    error.add_note("a note")
    assert error._render_traceback_() == ["ConfigError: a = 1: must be 2. Set it", "a note"]
