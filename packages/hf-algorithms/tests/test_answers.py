"""Answers to learn: which tokens are trained, compared with what transformers renders, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from chat_tokenizers import STYLES, build_chat_tokenizer
from hf_algorithms.data import AnswerDataset, PromptDataset, build_character_tokenizer, open_rows
from hf_algorithms.recipes.sft import SFTConfig, open_answers
from hf_protocols.errors import DataError

SYSTEM, ASK, MORE = ({"role": role, "content": text} for role, text in
                     (("system", "Be brief."), ("user", "What is 12 + 30?"), ("user", "And 1 more?")))  # fmt: skip
FIRST, SECOND = ({"role": "assistant", "content": text} for text in ("It is 42.", "It is 43."))
CHAT = [SYSTEM, ASK, FIRST, MORE, SECOND]


def build(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, *records: Any, max_tokens: int = 512, **options: Any
) -> AnswerDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = open_rows([(str(path), None)], is_learned=True)
    return AnswerDataset(rows, tokenizer, max_tokens=max_tokens, source="data.train = 'rows.jsonl'", **options)


def read(data: AnswerDataset, row: int = 0) -> tuple[list[int], list[list[int]]]:
    """All ids of a row, and the runs of trained ones."""
    batch = data.batch([row])
    prompt, response, mask = (
        batch[name].unbind()[0].tolist() for name in ("prompt_ids", "response_ids", "response_mask")
    )
    runs: list[list[int]] = [[]]
    for token, is_trained in zip(response, mask, strict=True):
        if is_trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return prompt + response, [run for run in runs if run]


@pytest.mark.parametrize("style", STYLES)
def test_every_message_of_the_assistant_is_trained(tmp_path: Path, style: str) -> None:
    """The row is what transformers renders of the chat, up to the end of its last turn; nothing else is trained."""
    tokenizer = build_chat_tokenizer(tmp_path / "tokenizer", style)
    chat = CHAT[1:]
    data = build(tmp_path, tokenizer, {"messages": chat, "answer": "42"})
    ids, runs = read(data)
    whole = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert whole[: len(ids)] == ids and len(whole) - len(ids) <= 3
    texts = [tokenizer.decode(run, skip_special_tokens=True).strip() for run in runs]
    if data.num_untrained_turns:
        assert texts == [SECOND["content"]]
    else:
        assert texts == [FIRST["content"], SECOND["content"]]
    assert runs[-1] == ids[-len(runs[-1]) :]
    assert all(run[-1] == runs[-1][-1] for run in runs), "the token that ends a turn"


HISTORY = (
    "{% for m in messages %}{{ m.role }}:{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% else %}-"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_message_that_the_template_changes_later_is_read_only(tmp_path: Path) -> None:
    tokenizer = build_chat_tokenizer(tmp_path / "tokenizer", "chatml")
    tokenizer.chat_template = HISTORY
    data = build(tmp_path, tokenizer, {"messages": CHAT})
    ids, runs = read(data)
    assert "assistant:-" in tokenizer.decode(ids)
    assert (len(runs), data.num_untrained_turns) == (1, 1)
    assert "1 earlier messages of the assistant are not trained" in data.describe_rows()[1]


def test_answers_of_prompts_are_those_of_the_warm_start(tmp_path: Path) -> None:
    tokenizer = build_character_tokenizer(["12+=3"], directory=tmp_path / "tokenizer")
    records = [{"prompt": "1+2=", "answer": 3}, {"prompt": "1+1=", "answer": "2"}]
    data = build(tmp_path, tokenizer, *records)
    warm = PromptDataset(open_rows([(str(tmp_path / "rows.jsonl"), None)]), tokenizer).supervised(
        [0, 1], max_response_tokens=9
    )
    batch = data.batch([0, 1])
    for name in ("prompt_ids", "response_ids", "response_mask"):
        assert [row.tolist() for row in batch[name].unbind()] == [row.tolist() for row in warm[name].unbind()]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"prompt": "2+2=", "completion": "4, since", "answer": "4"}, "4, since"),
        ({"messages": [ASK, FIRST], "answer": "42"}, FIRST["content"]),
        ({"messages": [ASK], "answer": "42"}, "42"),
        ({"prompt": [ASK], "completion": [FIRST]}, FIRST["content"]),
    ],
)
def test_what_is_written_counts_before_a_reference_answer(tmp_path: Path, record: Any, text: str) -> None:
    tokenizer = build_chat_tokenizer(tmp_path / "tokenizer", "chatml")
    _, (run,) = read(build(tmp_path, tokenizer, record))
    assert tokenizer.decode(run, skip_special_tokens=True).strip() == text


def test_long_rows_are_refused_left_out_or_cut(tmp_path: Path) -> None:
    tokenizer = build_character_tokenizer(["12+=3"], directory=tmp_path / "tokenizer")
    records = [{"prompt": "1+1+1=", "answer": "3"}, {"prompt": "1+1=", "answer": "2"}]
    whole, _ = read(build(tmp_path, tokenizer, *records))
    with pytest.raises(DataError, match=rf"line 1: it has {len(whole)} tokens, more than the model's context of 6"):
        build(tmp_path, tokenizer, *records, max_tokens=6)
    dropped = build(tmp_path, tokenizer, *records, max_tokens=6, too_long="drop")
    assert (len(dropped), dropped.num_dropped, dropped.longest) == (1, 1, (6, "data.train = 'rows.jsonl', line 2"))
    assert [row for _, row in dropped.order.draw(2, iteration=0, seed=0)] == [0, 0]
    cut = build(tmp_path, tokenizer, *records, max_tokens=6, too_long="truncate_left")
    assert (cut.num_cut, read(cut)) == (1, (whole[-6:], [whole[-2:]]))
    with pytest.raises(DataError, match=r"every row has more than 2 tokens, so data\.too_long = 'drop' leaves none"):
        build(tmp_path, tokenizer, *records, max_tokens=2, too_long="drop")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "1+1=", "answer": None}, "line 2: has no answer, so nothing can be learned from it"),
        ({"prompt": "1+1=", "answer": ""}, "line 2: has an empty answer, so nothing can be learned from it"),
        ({"prompt": "", "answer": "2"}, "line 2: no token stands before its answer. Add a prompt to the row"),
        ({"prompt": [ASK], "answer": [FIRST, MORE, SECOND]}, "line 2: field 'answer' is a chat of 3 messages"),
    ],
)
def test_a_row_of_which_nothing_is_learned_names_its_line(tmp_path: Path, record: Any, message: str) -> None:
    tokenizer = build_character_tokenizer(["12+="], directory=tmp_path / "tokenizer")
    with pytest.raises(DataError) as refused:
        build(tmp_path, tokenizer, {"prompt": "1+1=", "answer": "2"}, record)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_preference_pairs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1", "chosen": "1", "rejected": "2"}) + "\n")
    with pytest.raises(DataError, match=r"two responses to a prompt.*Use `hybridflow dpo`"):
        open_answers([(str(path), None)], SFTConfig(), prompt_field=None, answer_field=None)
