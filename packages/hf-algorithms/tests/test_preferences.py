"""Preference pairs: the forms of their rows, what is refused, and their tokens."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from chat_tokenizers import build_chat_tokenizer
from hf_algorithms.data import (
    PreferenceDataset,
    PreferenceRow,
    SequenceEncoder,
    TurnFormat,
    build_character_tokenizer,
    cut_to,
    load_preferences,
    open_preferences,
)
from hf_protocols.errors import DataError

FIRST, USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("system", "s"), ("user", "hi"), ("assistant", "a"), ("assistant", "b"))
)
OTHER = {"role": "system", "content": "t"}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
SAFE_RLHF = {"prompt": "p", "response_0": "x", "response_1": "y", "better_response_id": 1, "safer_response_id": 0,
             "is_response_0_safe": True, "is_response_1_safe": False}  # fmt: skip


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("record", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "p", "chosen": "x", "rejected": "y"}, "p", "x", "y"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, (USER,), (GOOD,), (BAD,)),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, (USER,), (GOOD,), (BAD,)),
        ({"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]}, (USER,), (GOOD,), (BAD,)),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, (USER,), (GOOD,), (BAD,)),
        (SAFE_RLHF, "p", "y", "x"),
        ({"question": "p", "chosen": "x", "rejected": "y", "messages": [USER]}, "p", "x", "y"),
        ({"prompt": "hi ", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, (USER,), (GOOD,), (BAD,)),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, (USER,), (GOOD,), (BAD,)),
        (
            {"prompt": "hi", "chosen": [FIRST, USER, GOOD], "rejected": [FIRST, USER, BAD]},
            (FIRST, USER),
            (GOOD,),
            (BAD,),
        ),
        (
            {"prompt": [USER], "chosen": [GOOD, USER, BAD], "rejected": [GOOD, USER, GOOD]},
            (USER,),
            (GOOD, USER, BAD),
            (GOOD, USER, GOOD),
        ),
    ],
)
def test_every_form_of_a_pair_is_read(tmp_path: Path, record: Any, prompt: Any, chosen: Any, rejected: Any) -> None:
    (row,) = load_preferences(write(tmp_path / "pairs.jsonl", record))
    assert (row.prompt, row.chosen, row.rejected) == (prompt, chosen, rejected)
    assert row.where == f"{tmp_path}/pairs.jsonl, line 1"


@pytest.mark.parametrize("prompt", ["hi", [USER]])
@pytest.mark.parametrize("sides", [("a", "b"), ([GOOD], [BAD]), ([USER, GOOD], [USER, BAD])])
def test_a_system_column_is_the_system_message(tmp_path: Path, prompt: Any, sides: Any) -> None:
    """The ids are those of the same conversation with its system message written out."""
    record = {"system": "Be brief.", "prompt": prompt, "chosen": sides[0], "rejected": sides[1]}
    (row,) = load_preferences(write(tmp_path / "pairs.jsonl", record))
    system = {"role": "system", "content": "Be brief."}
    assert (row.prompt, row.chosen, row.rejected) == ((system, USER), (GOOD,), (BAD,))
    tokenizer = build_chat_tokenizer(tmp_path, "phi3")
    chat = [[system, USER], [system, USER, GOOD], [system, USER, BAD]]
    batch = PreferenceDataset([row], tokenizer, max_tokens=99, source="data.train").batch([0])
    ids = [batch[name].unbind()[0].tolist() for name in ("prompt_ids", "response_ids", "rejected_ids")]
    wanted = [tokenizer.apply_chat_template(each, tokenize=False) for each in chat[1:]]
    for side, text in zip(ids[1:], wanted, strict=True):
        assert text.startswith(tokenizer.decode(ids[0] + side))
    turns = TurnFormat(tokenizer, system_prompt="Be kind.")
    with pytest.raises(DataError, match=r"line 1: has a column 'system', and data\.system_prompt is set as well\. "):
        PreferenceDataset([row], tokenizer, max_tokens=99, source="data.train", turns=turns)


@pytest.mark.parametrize("system", [None, "", "  "])
def test_an_empty_system_column_is_left_out(tmp_path: Path, system: Any) -> None:
    (row,) = load_preferences(
        write(tmp_path / "p.jsonl", {"system": system, "prompt": "p", "chosen": "x", "rejected": "y"})
    )
    assert (row.prompt, row.has_system) == ("p", False)


def test_the_prompt_of_a_pair_may_be_nested(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", {"task": {"text": "p"}, "chosen": "x", "rejected": "y"})
    (row,) = load_preferences(path, prompt_field="task.text")
    assert row.prompt == "p"
    with pytest.raises(
        DataError, match=r"line 1 has no field 'prompt'; its fields are 'task'.* Correct data.prompt_fie"
    ):
        load_preferences(path, prompt_field="prompt")


def test_costs_have_the_safer_side_first(tmp_path: Path) -> None:
    other = SAFE_RLHF | {"safer_response_id": 1, "is_response_1_safe": True}
    first, second = load_preferences(write(tmp_path / "pairs.jsonl", SAFE_RLHF, other), labels="cost")
    assert (first.chosen, first.rejected, first.unsafe) == ("x", "y", (False, True))
    assert (second.chosen, second.rejected, second.unsafe) == ("y", "x", (False, False))


@pytest.mark.parametrize(
    ("labels", "record", "message"),
    [
        ("reward", {"prompt": "p", "chosen": "x", "rejected": "x"}, "line 1: its two sides are equal, 'x'. Remove"),
        ("reward", {"prompt": "p", "chosen": "x"}, "line 1 lacks chosen and rejected, or response_0"),
        (
            "reward",
            {"chosen": "x", "rejected": "y"},
            "line 1 has no prompt; its fields are 'chosen', 'rejected'. Texts",
        ),
        ("reward", {"chosen": "x", "rejected": "y"}, "only chats may leave it out. Add a field 'prompt', or set data."),
        (
            "reward",
            {"chosen": "Human: 2+2? Assistant: 4", "rejected": "Human: 2+2? Assistant: 5"},
            "only chats may leave it out. Move what both texts begin with into a field 'prompt'",
        ),
        (
            "reward",
            {"prompt": "p", "chosen": [{"from": "gpt", "value": "x"}], "rejected": [{"from": "gpt", "value": "y"}]},
            "line 1: the messages of chosen have 'from' and 'value', which are not read. Write messages with 'role'",
        ),
        (
            "reward",
            {"instruction": "p", "input": "q", "chosen": "x", "rejected": "y"},
            "line 1: 'instruction' and 'input' may each hold the prompt. Join the two texts",
        ),
        (
            "reward",
            {"prompt": "p\ud800", "chosen": "x", "rejected": "y"},
            "line 1: field 'prompt' contains an unpaired",
        ),
        (
            "reward",
            {"prompt": [{**USER, "name": "\ud800"}], "chosen": [GOOD], "rejected": [BAD]},
            "line 1: field 'prompt' contains an unpaired",
        ),
        (
            "reward",
            {"prompt": "?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "line 1: a side begins with {'role",
        ),
        ("reward", {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD, USER]}, "line 1: a side ends with {'role"),
        ("reward", {"prompt": "p", "chosen": 3, "rejected": "y"}, "line 1: chosen is neither text nor a list"),
        ("reward", {"chosen": [USER, GOOD], "rejected": [USER]}, "line 1: without 'prompt' both sides must begin"),
        (
            "reward",
            {"system": "s", "chosen": [OTHER, USER, GOOD], "rejected": [OTHER, USER, BAD]},
            "line 1: its column 'system' is 's', and its chat begins with {'role",
        ),
        ("reward", {"system": 3, "prompt": "p", "chosen": "x", "rejected": "y"}, "line 1: system = 3 is not text"),
        ("reward", SAFE_RLHF | {"better_response_id": 2}, "line 1: better_response_id = 2 is not 0 or 1"),
        ("cost", SAFE_RLHF | {"is_response_1_safe": 1}, "line 1: is_response_1_safe = 1 is not true or false"),
        ("cost", {"prompt": "p", "chosen": "x", "rejected": "y"}, "line 1 lacks response_0, response_1, safer_resp"),
    ],
)
def test_a_wrong_row_is_one_line(tmp_path: Path, labels: Any, record: Any, message: str) -> None:
    with pytest.raises(DataError) as refused:
        load_preferences(write(tmp_path / "pairs.jsonl", record), labels=labels)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_empty_input_does_not_hold_the_prompt(tmp_path: Path) -> None:
    record = {"instruction": "p", "input": "", "chosen": "x", "rejected": "y"}
    assert load_preferences(write(tmp_path / "pairs.jsonl", record))[0].prompt == "p"
    late = write(tmp_path / "late.jsonl", *[record] * 100, record | {"input": "q"})
    with pytest.raises(DataError, match=r"line 101: field 'input' has text"):
        load_preferences(late)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    found = build_character_tokenizer("abcdefghiprtuxyz:; ", tmp_path_factory.mktemp("tokenizer"))
    found.chat_template = TEMPLATE
    return found


def dataset(tokenizer: Any, *rows: PreferenceRow, max_tokens: int = 100) -> PreferenceDataset:
    return PreferenceDataset(rows, tokenizer, max_tokens=max_tokens, source="data.train")


def read_batch(data: PreferenceDataset, tokenizer: Any) -> list[list[str]]:
    batch = data.batch(range(len(data)))
    columns = [batch[name].unbind() for name in ("prompt_ids", "response_ids", "rejected_ids")]
    return [[tokenizer.decode(row) for row in rows] for rows in zip(*columns, strict=True)]


def test_texts_end_with_the_end_of_sequence(tokenizer: PreTrainedTokenizerFast) -> None:
    data = dataset(tokenizer, PreferenceRow(prompt="ab", chosen="x", rejected="yz"))
    assert read_batch(data, tokenizer) == [["ab", "x<eos>", "yz<eos>"]]
    assert "signs" not in data.batch([0])


def test_a_tokenizer_without_letters_loses_nothing(tmp_path: Path) -> None:
    """Its token for what it does not know is special, and is not what it puts after a text."""
    digits = build_character_tokenizer("0123456789+=", tmp_path)
    data = dataset(digits, PreferenceRow(prompt="1+1=", chosen="2", rejected="11"))
    assert read_batch(data, digits) == [["1+1=", "2<eos>", "11<eos>"]]


def test_both_sides_of_a_chat_have_one_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    row = PreferenceRow(prompt=(USER,), chosen=(GOOD,), rejected=(BAD,), unsafe=(False, True))
    data = dataset(tokenizer, row)
    assert read_batch(data, tokenizer) == [["u:hi;a:", "a<eos>", "b<eos>"]]
    assert data.batch([0])["signs"].tolist() == [[-1.0, 1.0]]


def test_the_generation_prompt_is_kept_if_a_template_changes_it(tokenizer: PreTrainedTokenizerFast) -> None:
    """As templates do that leave the thoughts of earlier turns out."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}x{% endif %}"
    )
    try:
        data = dataset(tokenizer, PreferenceRow(prompt=(USER,), chosen=(GOOD,), rejected=(BAD,)))
        assert read_batch(data, tokenizer) == [["hix", "a<eos>", "b<eos>"]]
    finally:
        tokenizer.chat_template = TEMPLATE


def test_sides_of_several_turns_follow_the_common_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    row = PreferenceRow(prompt=(USER,), chosen=(GOOD, USER, BAD), rejected=(BAD, USER, GOOD))
    assert read_batch(dataset(tokenizer, row), tokenizer) == [["u:hi;a:", "a;u:hi;a:b<eos>", "b;u:hi;a:a<eos>"]]
    with pytest.raises(DataError, match=r"a response ends with {'role': 'user', 'content': 'hi'}, which is not"):
        dataset(tokenizer, PreferenceRow(prompt=(USER,), chosen=(GOOD, USER), rejected=(BAD, USER)))


def test_chats_of_pairs_are_written_as_the_run_writes_prompts(tmp_path: Path) -> None:
    """Template, system prompt and the token that ends a turn; a text is a chat where a template is set."""
    tokenizer = build_chat_tokenizer(tmp_path, "phi3")
    turns = TurnFormat(tokenizer, system_prompt="Be brief.")
    chat = ({"role": "user", "content": "hi"},)
    wanted = [turns.encode_prompts([chat])[0], *turns.encode_responses([chat] * 2, ["a", "b"])]
    assert tokenizer.convert_ids_to_tokens(wanted[1][-1]) == "<|end|>"
    for prompt, sides in ((chat, ((GOOD,), (BAD,))), ("hi", ("a", "b"))):
        row = PreferenceRow(prompt=prompt, chosen=sides[0], rejected=sides[1])
        batch = PreferenceDataset([row], tokenizer, max_tokens=99, source="data.train", turns=turns).batch([0])
        found = [batch[name].unbind()[0].tolist() for name in ("prompt_ids", "response_ids", "rejected_ids")]
        assert found == wanted


def test_a_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    plain = build_character_tokenizer("abhi", tmp_path)
    row = PreferenceRow(prompt=(USER,), chosen=(GOOD,), rejected=(BAD,), where="pairs.jsonl, line 3")
    with pytest.raises(
        DataError, match=r"^pairs\.jsonl, line 3: is a chat, and the tokenizer has no chat template\. Set"
    ):
        dataset(plain, row)
    with pytest.raises(
        DataError, match=r"^x: its tokenizer has no chat template, and a row is a chat\. Write the rows"
    ):
        SequenceEncoder(plain, label="x").encode_chat([USER], [[GOOD]])


@pytest.mark.parametrize(
    ("max_tokens", "wanted"),
    [
        (7, ["abcd", "x<eos>", "yz<eos>"]),
        (5, ["cd", "x<eos>", "yz<eos>"]),
        (4, ["d", "x<eos>", "yz<eos>"]),
        (3, ["d", "x<eos>", "z<eos>"]),
    ],
)
def test_cutting_keeps_ends_and_one_prompt(tokenizer: Any, max_tokens: int, wanted: list[str]) -> None:
    data = dataset(tokenizer, PreferenceRow(prompt="abcd", chosen="x", rejected="yz"), max_tokens=max_tokens)
    assert read_batch(data, tokenizer) == [wanted]
    assert data.num_cut == (max_tokens < 7)


def test_cutting_never_exceeds_the_limit() -> None:
    for limit in range(2, 12):
        for lengths in ((1, 1, 1), (5, 3, 4), (1, 9, 2), (9, 9, 9)):
            prompt, *sides = ([part] * length for part, length in enumerate(lengths))
            kept, *cut = cut_to(limit, prompt, sides)
            assert kept == prompt[len(prompt) - len(kept) :]
            assert kept
            assert all(len(kept) + len(side) <= limit for side in cut)
            assert all(len(side) == min(len(whole), limit - len(kept)) for side, whole in zip(cut, sides, strict=True))


def test_pairs_of_several_files_are_read_by_row(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Batches are those of pairs in memory; 1.2 MB of texts never are."""
    num_rows, text = 200, "abcd" * 250
    for part in range(2):
        records = [{"prompt": text, "chosen": "x" * (n % 7 + 1), "rejected": text + "y"} for n in range(num_rows)]
        write(tmp_path / f"pairs{part}.jsonl", *records)
    sources = [(f"{tmp_path}/pairs*.jsonl", 2.0), (f"{tmp_path}/pairs1.jsonl", 1.0)]
    rows = [row for path, _ in sources for row in load_preferences(path)]
    wanted = PreferenceDataset(rows[-20:], tokenizer, max_tokens=100, source="data.train")
    del rows
    tracemalloc.start()
    try:
        opened = open_preferences(sources)
        data = PreferenceDataset(opened, tokenizer, max_tokens=100, source="data.train")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 600_000, peak
    assert (opened.source_sizes, opened.weights, len(data)) == ([400, 200], (2.0, 1.0), 600)
    for name, column in data.batch(range(580, 600)).items():
        if name != "row_id":
            for found, expected in zip(column.unbind(), wanted.batch(range(20))[name].unbind(), strict=True):
                assert found.tolist() == expected.tolist()
    assert data.num_cut == 600
    assert data.longest == (2 * 99 + 2, f"{tmp_path}/pairs0.jsonl, line 1")


def test_sides_of_the_same_tokens_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    row = PreferenceRow(prompt="a", chosen="Q", rejected="R", where="pairs.jsonl, line 4")
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 4: both sides are the same to this tokenizer"):
        dataset(tokenizer, row)
    row = PreferenceRow(prompt="a", chosen="xaaa", rejected="yaaa", where="pairs.jsonl, line 4")
    with pytest.raises(DataError, match="line 4: the last 4 tokens of both sides are the same"):
        dataset(tokenizer, row, max_tokens=4)


def test_what_a_tokenizer_puts_after_a_text_ends_the_response() -> None:
    """BERT's kind: [CLS] before and [SEP] after; there is no end of sequence."""
    words = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c"])}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    bert = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    encoder = SequenceEncoder(bert, label="reward.model.path")
    for has_ended in (True, False):
        assert encoder.encode_text("a b", "c", has_ended=has_ended) == ([2, 4, 5], [6, 3])
    assert [*[2, 4, 5], *[6, 3]] == bert("a b c")["input_ids"]
