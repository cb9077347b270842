"""Sequences of digits to go on with: rows have the promised shares of right digits, and each is paid at its place."""

from __future__ import annotations

from pathlib import Path

import completion_task
import pytest
from completion_task import RIGHT_SHARES, share_of_digits

from hf_algorithms.data import Row, load_rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    completion_task.write_completion(folder)
    return folder


def score(rows: list[Row]) -> list[float]:
    return share_of_digits([row.prompt for row in rows], [row.answer for row in rows], [""] * len(rows))


def test_every_prompt_is_tested_once_with_its_sequence(rows: Path) -> None:
    found = load_rows(rows / "test.jsonl")
    assert len({row.prompt for row in found}) == len(found) == 30
    assert next(row.answer for row in found if row.prompt == "147=") == "03692581"
    assert score(found) == [1.0] * 30


def test_rows_have_right_digits_as_often_as_promised(rows: Path) -> None:
    found = load_rows(rows / "train.jsonl")
    assert {len(row.answer) for row in found} == {8}
    for step, wanted in RIGHT_SHARES.items():
        scores = score([row for row in found if (int(row.prompt[1]) - int(row.prompt[0])) % 10 == step])
        error = (wanted * (1 - wanted) / (8 * len(scores))) ** 0.5
        assert sum(scores) / len(scores) == pytest.approx(wanted, abs=4 * error), step


def test_digits_are_paid_at_their_places() -> None:
    responses = ["03692581", "03", "9369", "93692581", "036925819", "3692581", ""]
    scores = share_of_digits(["147="] * 7, responses, [""] * 7)
    assert [round(8 * each) for each in scores] == [8, 2, 3, 7, 8, 0, 0]
