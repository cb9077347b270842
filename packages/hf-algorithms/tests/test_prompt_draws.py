"""The rows of an iteration: numbered, never twice, and independent of earlier iterations."""

from __future__ import annotations

import pytest

from hf_algorithms.data import PromptDataset, Row, build_character_tokenizer, load_tokenizer, select_rows
from hf_algorithms.run.iteration import PromptDraws
from hf_protocols import DataError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PromptDataset:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_character_tokenizer("0123456789", folder)
    rows = [Row(prompt=str(number), answer=str(number)) for number in range(10)]
    return PromptDataset(rows, load_tokenizer(str(folder)), source="data.train = 'rows.jsonl'")


def test_an_iteration_draws_no_row_twice(data: PromptDataset) -> None:
    draws = PromptDraws(data, 4, position=4, iteration=2, seed=7)
    batches = [draws.first(), draws.more(3), draws.more(2)]
    assert batches[0]["row_id"].tolist() == select_rows(10, 4, iteration=1, seed=7)
    rows = [row for batch in batches for row in batch["row_id"].tolist()]
    assert len(set(rows)) == len(rows) == 9
    assert [batch["group_id"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6], [7, 8]]
    ids = [batch["prompt_id"].tolist() for batch in batches]
    assert ids == [[[0, row, attempt] for row in batch["row_id"].tolist()] for attempt, batch in enumerate(batches)]
    again = PromptDraws(data, 4, position=4, iteration=2, seed=7)
    again.first()
    assert again.more(3)["row_id"].tolist() == batches[1]["row_id"].tolist()


def test_later_iterations_are_of_later_epochs(data: PromptDataset) -> None:
    epochs = [
        PromptDraws(data, 4, position=4 * i - 4, iteration=i, seed=0).first()["prompt_id"][:, 0].tolist()
        for i in (1, 3, 8)
    ]
    assert epochs == [[0] * 4, [0, 0, 1, 1], [2, 2, 3, 3]]


def test_more_prompts_than_there_are_is_one_line(data: PromptDataset) -> None:
    draws = PromptDraws(data, 4, position=0, iteration=1, seed=0)
    draws.first()
    with pytest.raises(
        DataError, match=r"^data\.train = 'rows\.jsonl': the step asks for 7 more prompts, 6 of its 10 "
    ):
        draws.more(7)


def test_rows_to_learn_from_have_answers(data: PromptDataset) -> None:
    batch = PromptDraws(data, 4, position=0, iteration=1, seed=0).pretraining(5, max_response_tokens=8)
    assert len(batch) == 5
    assert [len(row) for row in batch["response_ids"].unbind()] == [2] * 5


def test_updates_of_an_iteration_learn_from_different_rows(data: PromptDataset) -> None:
    draws = PromptDraws(data, 4, position=0, iteration=1, seed=0)
    found = [draws.pretraining(5, max_response_tokens=8)["row_id"].tolist() for _ in range(3)]
    assert sorted(found[0] + found[1]) == list(range(10))
    later = PromptDraws(data, 4, position=4, iteration=2, seed=0, num_learned=draws.num_learned)
    assert sorted(found[2] + later.pretraining(5, max_response_tokens=8)["row_id"].tolist()) == list(range(10))


@pytest.mark.parametrize("num_rows", [0, -1])
def test_no_rows_cannot_be_drawn(data: PromptDataset, num_rows: int) -> None:
    draws = PromptDraws(data, 4, position=0, iteration=1, seed=0)
    with pytest.raises(DataError, match=rf"asks for {num_rows} more prompts\. Ask for at least 1"):
        draws.more(num_rows)
    with pytest.raises(DataError, match=rf"asks for {num_rows} rows to learn\. Ask for at least 1"):
        draws.pretraining(num_rows, max_response_tokens=8)
