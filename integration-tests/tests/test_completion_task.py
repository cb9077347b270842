"""Sequences of digits to go on with: rows have the promised share of slips, and digits are paid up to the first one."""

from __future__ import annotations

from pathlib import Path

import completion_task
import pytest
from completion_task import RIGHT_SHARE, share_of_digits

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


def test_rows_end_after_a_slip_as_often_as_promised(rows: Path) -> None:
    found = load_rows(rows / "train.jsonl")
    right = [round(8 * each) for each in score(found)]
    slips = sum(row.answer.endswith("?") for row in found)
    share = sum(right) / (sum(right) + slips)  # of all digits that were drawn
    assert share == pytest.approx(RIGHT_SHARE, abs=4 * (0.16 / (sum(right) + slips)) ** 0.5)
    assert all(len(row.answer) == (count if count == 8 else count + 2) for row, count in zip(found, right, strict=True))


def test_digits_are_paid_up_to_the_first_wrong_one() -> None:
    responses = ["03692581", "03", "9369", "0379", "036925819", ""]
    scores = share_of_digits(["147="] * 6, responses, [""] * 6)
    assert [round(8 * each) for each in scores] == [8, 2, 0, 2, 8, 0]
