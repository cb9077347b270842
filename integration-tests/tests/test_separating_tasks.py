"""Tasks that separate algorithms: rows have the shares of right answers that are promised, and rewards see them."""

from __future__ import annotations

from pathlib import Path

import pytest
import separating_recipes
import separating_tasks
from separating_tasks import EASY, HARD, SURE, has_right_parity, is_right_digit

from hf_algorithms import derive_dataflow
from hf_algorithms.data import load_rows
from hf_engine import SamplingParams


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    separating_tasks.write_task_data(folder)
    return folder


@pytest.mark.parametrize(("name", "shares"), [("mixture", (EASY, HARD)), ("extremes", (HARD, SURE, HARD, SURE))])
def test_answers_are_right_as_often_as_promised(rows: Path, name: str, shares: tuple[float, ...]) -> None:
    found = load_rows(rows / f"{name}.jsonl")
    for kind, share in enumerate(shares):
        part = found[kind :: len(shares)]
        right = is_right_digit([row.prompt for row in part], [row.answer for row in part], [""] * len(part))
        deviation = (share * (1 - share) / len(part)) ** 0.5
        assert sum(right) / len(part) == pytest.approx(share, abs=4 * deviation)


@pytest.mark.parametrize(("name", "prompts"), [("mixture", 20), ("extremes", 40), ("parity", 10)])
def test_every_prompt_is_tested_once_with_its_right_answer(rows: Path, name: str, prompts: int) -> None:
    found = load_rows(rows / f"{name}-test.jsonl")
    assert len({row.prompt for row in found}) == len(found) == prompts
    reward = has_right_parity if name == "parity" else is_right_digit
    assert reward([row.prompt for row in found], [row.answer for row in found], [""] * prompts) == [1.0] * prompts


def test_wrong_parities_alone_are_followed_by_dots(rows: Path) -> None:
    found = load_rows(rows / "parity.jsonl")
    right = has_right_parity([row.prompt for row in found], [row.answer for row in found], [""] * len(found))
    assert sum(right) / len(right) == pytest.approx(0.5, abs=0.04)
    assert all(len(row.answer) == 1 for row, score in zip(found, right, strict=True) if score)
    wrong = [len(row.answer) for row, score in zip(found, right, strict=True) if not score]
    assert sum(wrong) / len(wrong) == pytest.approx(3, abs=0.3)


def test_rewards_read_the_response_alone() -> None:
    assert is_right_digit(["a0="], [str((3 * ord("a")) % 10)], ["9"]) == [1.0]
    assert is_right_digit(["a0="], [""], ["9"]) == [0.0]
    assert has_right_parity(["4=", "4=", "4="], ["e", "e...", "o"], [""] * 3) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["GRPO", "DR_GRPO", "MAXRL", "DAPO", "STALE"])
def test_the_recipes_of_the_tasks_can_run(name: str) -> None:
    recipe = getattr(separating_recipes, name)
    flow = derive_dataflow(recipe, recipe.config(), SamplingParams(max_new_tokens=4, n=2), num_prompts=2)
    assert "update_actor" in {call.method for call in flow.calls}
