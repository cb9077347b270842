from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch

from hf_algorithms.data import (
    AnswerDataset,
    PreferenceDataset,
    PreferenceRow,
    PromptDataset,
    Row,
    TurnFormat,
    build_character_tokenizer,
    open_rows,
    select_rows,
)
from hf_algorithms.jagged import decode_text
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


@pytest.mark.parametrize(
    ("action", "kept", "prompts"),
    [("drop", [1, 2], ["1+1=", "9+0="]), ("truncate_left", [0, 1, 2], ["+85=", "1+1=", "9+0="])],
)
def test_longer_prompts_are_left_out_or_cut(tokenizer, action, kept, prompts):
    data = PromptDataset(ROWS, tokenizer, source="x", max_prompt_tokens=4, too_long=action)
    batch = data.prompts(range(len(data)))
    assert batch["row_id"].tolist() == kept, "the row of the file"
    assert batch["prompt_id"][:, 1].tolist() == kept
    assert _lists(batch["prompt_ids"]) == [_ids(prompt) for prompt in prompts]
    assert list(data.prompt_lengths) == [len(prompt) for prompt in prompts]
    assert (len(data), data.num_too_long, data.longest, data.max_prompt_tokens) == (len(kept), 1, 6, 4)
    assert data.where(len(kept) - 1) == "x, line 3"
    assert data.supervised([len(kept) - 1], max_response_tokens=9)["row_id"].tolist() == [2]
    assert "1 of 3 prompts have more than 4 tokens (the longest has 6)" in data.describe_too_long()


def test_a_longer_prompt_is_refused_by_default(tokenizer):
    with pytest.raises(DataError, match=r"^x, line 1: its prompt has 6 tokens, more than data.max_prompt_tokens = 4"):
        PromptDataset(ROWS, tokenizer, source="x", max_prompt_tokens=4)
    with pytest.raises(DataError, match=r"^x: every prompt has more than 3 tokens"):
        PromptDataset(ROWS, tokenizer, source="x", max_prompt_tokens=3, too_long="drop")


def test_the_token_that_begins_a_sequence_is_not_cut(tmp_path):
    tokenizer = build_character_tokenizer("<" + CHARACTERS, tmp_path)
    tokenizer.bos_token = "<"
    data = PromptDataset([Row("<37+85=")], tokenizer, max_prompt_tokens=4, too_long="truncate_left")
    assert tokenizer.decode(_lists(data.prompts([0])["prompt_ids"])[0]) == "<85="


def test_sources_with_weights_share_every_batch(tokenizer, tmp_path):
    for name, prompts in (("a", ["1=", "2=", "37+85="]), ("b", ["3="])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    rows = open_rows([(str(tmp_path / f"{name}.jsonl"), 1.0) for name in "ab"])
    data = PromptDataset(rows, tokenizer, source="data.train = []", max_prompt_tokens=4, too_long="drop")
    drawn = [row for i in range(4) for _, row in data.order.draw(4, iteration=i, seed=0)]
    assert Counter(drawn) == {0: 4, 1: 4, 2: 8}
    assert data.where(2) == f"data.train: {tmp_path / 'b.jsonl'}, line 1"
    (tmp_path / "b.jsonl").write_text('{"prompt": "3333="}')
    rows = open_rows([(str(tmp_path / f"{name}.jsonl"), 1.0) for name in "ab"])
    with pytest.raises(DataError, match="leaves no row of its source 2"):
        PromptDataset(rows, tokenizer, max_prompt_tokens=4, too_long="drop")


@pytest.mark.parametrize("weights", [None, (3.0, 1.0), (0.5, 0.5), (1.0, 5.0)])
def test_what_too_long_leaves_is_drawn_by_weight_without_gaps(tokenizer, tmp_path, weights):
    """Sources of 7 and 5 rows, of which every third and every second is too long, over many epochs of each."""
    kept = []
    for name, size, dropped in (("a", 7, 3), ("b", 5, 2)):
        prompts = [f"{number}=" + "1" * 9 * (number % dropped == 0) for number in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
        kept.append([f"{name}{number}" for number in range(size) if number % dropped])
    given = weights or (None, None)
    rows = open_rows([(str(tmp_path / f"{name}.jsonl"), weight) for name, weight in zip("ab", given, strict=True)])
    data = PromptDataset(rows, tokenizer, max_prompt_tokens=4, too_long="drop")
    names = dict(enumerate([*kept[0], *kept[1]]))
    assert [rows[each].prompt[0] for each in data.prompts(range(len(data)))["row_id"].tolist()] == [
        name[1:] for name in names.values()
    ], "numbers of what remains are those of the rows"
    drawn = [names[row] for i in range(48) for _, row in data.order.draw(5, iteration=i, seed=4)]
    if weights is None:
        sets, shares = [[*kept[0], *kept[1]]], [1.0]
    else:
        sets, shares = kept, [each / sum(weights) for each in weights]
    for part, share in zip(sets, shares, strict=True):
        own = [name for name in drawn if name in part]
        assert len(own) == share * len(drawn)
        whole = len(own) // len(part) * len(part)
        epochs = [own[start : start + len(part)] for start in range(0, whole, len(part))]
        assert all(sorted(epoch) == sorted(part) for epoch in epochs), "each row once in an epoch of its source"
        assert len(set(own[whole:])) == len(own) - whole
    assert sorted(data.order.arrange(iteration=3, seed=1)) == list(range(len(data)))


def test_the_first_rows_of_weighted_sources_are_one_set(tokenizer, tmp_path):
    """A run without validation rows evaluates these rows, from all sources."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1="}\n' * 3)
    rows = open_rows([(str(tmp_path / f"{name}.jsonl"), 1.0) for name in "ab"])
    assert len(PromptDataset(rows.first(2), tokenizer)) == 2


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


def test_a_column_may_have_an_unpaired_surrogate(tokenizer, tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answer": "2", "title": "cut \ud83d"}))
    (text,) = decode_text(PromptDataset(open_rows([(str(path), None)]), tokenizer).prompts([0])["row_extra"])
    assert json.loads(text) == [None, "2", {"title": "cut \ud83d"}]


def test_texts_among_chats_are_mentioned(tmp_path):
    tokenizer = build_character_tokenizer(CHARACTERS, tmp_path)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    text, chat = Row("9+0=", "9"), Row(({"role": "user", "content": "1+1="},), "2")
    says = "data.train = 'a': 1 of 3 rows are texts among chats: the chat template does not write them"
    how = {"source": "data.train = 'a'"}
    mixed, alike = [text, chat, chat], ([chat], [text])
    assert PromptDataset(mixed, tokenizer, **how).describe_mixture() == says
    assert [PromptDataset(rows, tokenizer).describe_mixture() for rows in alike] == [None, None]
    written = TurnFormat(tokenizer, system_prompt="1")
    assert PromptDataset(mixed, tokenizer, turns=written, **how).describe_mixture() is None
    assert AnswerDataset(mixed, tokenizer, max_tokens=32, **how).describe_rows()[1:] == [says]
    assert [len(AnswerDataset(rows, tokenizer, max_tokens=32, **how).describe_rows()) for rows in alike] == [1, 1]
    pairs = [
        PreferenceRow(prompt="9+0=", chosen="9", rejected="0"),
        *[PreferenceRow(prompt=chat.prompt, chosen="2", rejected="3")] * 2,
    ]
    assert PreferenceDataset(pairs, tokenizer, max_tokens=32, **how).describe_rows()[1:] == [says]
    assert len(PreferenceDataset(pairs[1:], tokenizer, max_tokens=32, **how).describe_rows()) == 1
