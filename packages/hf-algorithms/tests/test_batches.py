from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch

from hf_algorithms.data import PromptDataset, Row, build_character_tokenizer, select_rows
from hf_protocols.errors import BatchError, ConfigError, DataError

ROWS = [Row("37+85=", "122"), Row("1+1=", "2"), Row("9+0=", "")]
CHARACTERS = "0123456789+="


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_character_tokenizer(CHARACTERS, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def dataset(tokenizer):
    return PromptDataset(ROWS, tokenizer)


def _ids(text):
    return [3 + CHARACTERS.index(character) for character in text]


def _lists(column):
    return [row.tolist() for row in column.unbind()]


def test_prompts_are_the_columns_of_the_contract(dataset):
    batch = dataset.prompts([2, 0, 2])
    assert batch.batch_size == torch.Size([3])
    assert set(batch.keys()) == {"row_id", "prompt_ids", "answer", "group_id", "prompt_id"}
    assert batch["row_id"].tolist() == [2, 0, 2]
    assert _lists(batch["prompt_ids"]) == [_ids("9+0="), _ids("37+85="), _ids("9+0=")]
    assert [bytes(row).decode() for row in _lists(batch["answer"])] == ["", "122", ""]
    assert (batch["row_id"].dtype, batch["prompt_ids"].dtype, batch["answer"].dtype) == (
        torch.int64,
        torch.int64,
        torch.uint8,
    )
    assert batch["prompt_ids"].layout == torch.jagged
    assert len(dataset) == 3
    assert dataset.rows == ROWS
    assert dataset.max_prompt_tokens == 6


def test_supervised_responses_end_and_are_cut(dataset, tokenizer):
    end = tokenizer.eos_token_id
    batch = dataset.supervised([0, 1, 2], max_response_tokens=3)
    assert _lists(batch["response_ids"]) == [_ids("122"), [*_ids("2"), end], [end]]
    assert _lists(batch["response_mask"]) == [[True] * 3, [True] * 2, [True]]
    assert batch["response_mask"].dtype == torch.bool
    assert dataset.count_cut_answers(3) == 1
    assert dataset.count_cut_answers(4) == 0
    assert _lists(dataset.supervised([0], max_response_tokens=4)["response_ids"]) == [[*_ids("122"), end]]


def test_a_batch_of_no_rows_is_a_batch(dataset):
    assert dataset.prompts([]).batch_size == torch.Size([0])


def test_lengths_are_those_of_the_batches(dataset):
    prompts, learned = dataset.prompts([0, 1, 2]), dataset.supervised([0, 1, 2], max_response_tokens=3)
    assert list(dataset.prompt_lengths) == [len(row) for row in _lists(prompts["prompt_ids"])]
    assert dataset.response_lengths(3) == [len(row) for row in _lists(learned["response_ids"])]


def test_rows_that_nothing_can_follow_are_refused(tokenizer):
    with pytest.raises(DataError, match=r"^data.test = 'x', line 2: its prompt has no tokens.* and so have 1 other"):
        PromptDataset([ROWS[0], Row("", "1"), Row("", "2")], tokenizer, source="data.test = 'x'")
    with pytest.raises(DataError, match="it needs at least one"):
        PromptDataset([], tokenizer)


def test_rows_outside_and_tokenizers_without_an_end_are_refused(dataset, tmp_path):
    with pytest.raises(BatchError, match="row 3 of a data set with 3 rows"):
        dataset.prompts([0, 3])
    endless = build_character_tokenizer(CHARACTERS, tmp_path)
    endless.eos_token = None
    with pytest.raises(ConfigError, match="end-of-sequence"):
        PromptDataset(ROWS, endless).supervised([0], max_response_tokens=4)


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 3), (10, 10), (4, 11), (1, 5), (7, 1)])
def test_every_row_comes_once_per_epoch(num_rows, batch_size):
    read = [row for i in range(40) for row in select_rows(num_rows, batch_size, iteration=i, seed=5)]
    assert len(read) == 40 * batch_size
    epochs = [read[start : start + num_rows] for start in range(0, len(read), num_rows)]
    for epoch in epochs[:-1]:
        assert Counter(epoch) == Counter(range(num_rows))
    if num_rows >= 7:
        assert epochs[0] != epochs[1]


def test_rows_of_an_iteration_need_no_history():
    late = select_rows(100, 8, iteration=1000, seed=0)
    assert late == select_rows(100, 8, iteration=1000, seed=0)
    assert late != select_rows(100, 8, iteration=1000, seed=1)
    assert late != select_rows(100, 8, iteration=999, seed=0)
    with pytest.raises(ConfigError, match="num_rows=0"):
        select_rows(0, 8, iteration=0, seed=0)


def test_importing_data_and_rewards_loads_nothing_heavy():
    code = (
        "import hf_algorithms.data, hf_algorithms.rewards, sys;"
        "print(sorted({'torch', 'tensordict', 'tokenizers', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_rows_with_columns_or_chats_travel_as_json(tmp_path):
    tokenizer = build_character_tokenizer(CHARACTERS, tmp_path)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if add_generation_prompt %}={% endif %}"
    chat = ({"role": "user", "content": "1+2"},)
    rows = [Row("1+1=", "2"), Row(chat, None, {"level": 3})]
    batch = PromptDataset(rows, tokenizer).prompts([0, 1])
    found = [json.loads(bytes(each)) for each in _lists(batch["row_extra"])]
    assert found == [[None, "2", {}], [list(chat), None, {"level": 3}]]
    assert _lists(batch["prompt_ids"]) == [_ids("1+1="), _ids("1+2=")]
    assert "row_extra" not in PromptDataset(rows[:1], tokenizer).prompts([0])
