"""Columns by name: what a row of each shape becomes, what the user names, and what has no single meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_algorithms.data import Row, load_rows, open_rows
from hf_protocols.errors import DataError

USER = {"role": "user", "content": "2 + 2?"}
TURN = {"role": "assistant", "content": "4"}


def write(folder: Path, *records: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize(
    ("record", "row"),
    [
        ({"question": "q", "answer": 4}, Row("q", "4")),
        ({"messages": [USER, TURN]}, Row((USER,), "4")),
        ({"prompt": [USER, TURN], "answer": "4"}, Row((USER, TURN), "4")),
        ({"messages": [USER], "answer": "4"}, Row((USER,), "4")),
        ({"messages": [USER, TURN], "answer": "four"}, Row((USER,), "four")),
        ({"prompt": [USER], "completion": [TURN]}, Row((USER,), "4", {"completion": [TURN]})),
        ({"prompt": "q", "question": "other"}, Row("q", None, {"question": "other"})),
        ({"prompt": "q", "answer": ["4", "four"]}, Row("q", '["4", "four"]')),
        ({"prompt": "q", "label": True}, Row("q", None, {"label": True})),
        (
            {"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "4"}, "data_source": "d"},
            Row((USER,), "4", {"reward_model": {"style": "rule", "ground_truth": "4"}, "data_source": "d"}),
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, Row("q", None, {"chosen": "a", "rejected": "b"})),
    ],
)
def test_a_row_of_each_shape(tmp_path: Path, record: dict[str, Any], row: Row) -> None:
    assert load_rows(write(tmp_path, record)) == [row]


def test_fields_that_the_user_names_may_be_nested(tmp_path: Path) -> None:
    record = {"task": {"text": "q"}, "a.b": "dotted", "a": {"b": "deep", "c": {"d": 1}}, "answer": "other"}
    path = write(tmp_path, record)
    rows = [load_rows(path, prompt_field="task.text", answer_field=name)[0] for name in ("a.b", "a.c.d")]
    assert [(row.prompt, row.answer, dict(row.columns)) for row in rows] == [
        ("q", "dotted", record),
        ("q", "1", record),
    ]


@pytest.mark.parametrize(
    ("record", "names", "key"),
    [
        ({"prompt": "q", "messages": [USER]}, ("'prompt'", "'messages'"), "data.prompt_field"),
        ({"question": "q", "problem": "q"}, ("'question'", "'problem'"), "data.prompt_field"),
        ({"prompt": "q", "answer": "a", "solution": "s"}, ("'answer'", "'solution'"), "data.answer_field"),
        (
            {"prompt": "q", "label": "a", "reward_model": {"ground_truth": "s"}},
            ("'label'", "'reward_model.ground_truth'"),
            "data.answer_field",
        ),
    ],
)
def test_an_ambiguity_names_both_and_the_key(
    tmp_path: Path, record: dict[str, Any], names: tuple[str, str], key: str
) -> None:
    with pytest.raises(DataError) as caught:
        load_rows(write(tmp_path, record))
    assert all(part in str(caught.value) for part in (*names, f"Set {key} to the one that does"))
    named = {key.removeprefix("data."): names[0].strip("'")}
    assert len(load_rows(write(tmp_path, record), **named)) == 1


def test_fields_of_different_rows_are_named_with_their_rows(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "q"}, {"messages": [USER]})
    with pytest.raises(DataError, match=r"'prompt' \(row 1\) and 'messages' \(row 2\) may each hold the prompt"):
        load_rows(path)


@pytest.mark.parametrize(("field", "key"), [("prompt_field", "prompt"), ("answer_field", "answer")])
def test_a_field_that_no_row_has_is_refused(tmp_path: Path, field: str, key: str) -> None:
    path = write(tmp_path, {"prompt": "q", "{odd}": "a"})
    with pytest.raises(
        DataError, match=rf"no field 'a\.b'; its fields are 'prompt', '{{odd}}'\. Correct data\.{key}_field"
    ):
        load_rows(path, **{field: "a.b"})


@pytest.mark.parametrize(
    "records",
    [
        [{"prompt": None, "answer": "a"}],
        [{"answer": "a"}, {"prompt": True}],
        [{"answer": "a", "prompt": None}, {"prompt": None}],
    ],
)
def test_a_prompt_without_a_text_is_not_called_absent(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    with pytest.raises(
        DataError, match=r"line 1: no prompt stands .* 'prompt' holds no text, .*; the fields are "
    ) as found:
        load_rows(write(tmp_path, *records))
    fields = str(found.value).rpartition("fields are ")[2]
    assert "'prompt'" in fields and "'answer'" in fields


def test_answers_may_be_absent_in_some_rows(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b", "answer": "2"}, {"prompt": "c", "answer": None})
    assert [row.answer for row in load_rows(path)] == [None, "2", None]


def test_messages_that_are_a_response_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: field 'messages' has no message before the response"):
        load_rows(write(tmp_path, {"messages": [USER]}, {"messages": [TURN]}))


def test_files_of_one_set_may_have_columns_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\nq,1\n")
    rows = open_rows([(str(tmp_path / "a.csv"), 2.0), (write(tmp_path, {"prompt": "p", "label": "2"}), 1.0)])
    assert list(rows) == [Row("q", "1"), Row("p", "2", {"label": "2"})]
    assert [each.describe().partition(" is ")[2] for each in rows.files] == [
        "CSV of 1 rows: prompts; prompt = 'question', answer = 'answer'",
        "JSONL of 1 rows: prompts; prompt = 'prompt', answer = 'label'; other columns: 'label'",
    ]


def test_media_that_no_model_reads_are_mentioned(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "<image> What is it?", "answer": "a cat", "images": ["a.png"], "level": 1})
    (file,) = open_rows([(path, None)]).files
    assert file.describe().endswith("; other columns: 'images', 'level'; models read text only, not 'images'")


ALPACA = {"instruction": "Add.", "input": "2 + 2", "output": "4"}
NO_INPUT = {"instruction": "2 + 2?", "input": "", "output": "4"}


def test_a_column_without_text_is_not_a_candidate(tmp_path: Path) -> None:
    rows = load_rows(write(tmp_path, NO_INPUT, {**NO_INPUT, "input": "  "}, {**NO_INPUT, "input": None}))
    assert [(row.prompt, row.answer) for row in rows] == [("2 + 2?", "4")] * 3
    (row,) = load_rows(write(tmp_path, {"prompt": "q", "answer": "a", "solution": ""}))
    assert row.answer == "a"
    assert load_rows(write(tmp_path, NO_INPUT), prompt_field="input")[0].prompt == ""


def test_text_in_a_column_that_was_left_out_is_refused(tmp_path: Path) -> None:
    """The first rows decide, so a later row must not lose its text."""
    rows = open_rows([(write(tmp_path, *[NO_INPUT] * 100, ALPACA), None)])
    assert rows[99].prompt == "2 + 2?"
    with pytest.raises(
        DataError, match=r"line 101: field 'input' has text, .* 'instruction' holds the prompt\. Join the "
    ):
        list(rows)
    with pytest.raises(DataError, match=r"line 101: field 'solution' has text, .*'answer' holds the answer\. Set data"):
        list(open_rows([(write(tmp_path, *[{"prompt": "q", "answer": "a", "solution": ""}] * 100, SOLVED), None)]))


SOLVED = {"prompt": "q", "answer": "a", "solution": "s"}


def test_instructions_with_inputs_are_to_be_joined(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"'instruction' \(row 1\) and 'input' \(row 2\) may .*\. Join the two texts .* field 'prompt', or set "
        r"data\.prompt_field to the one that does$",
    ):
        load_rows(write(tmp_path, NO_INPUT, ALPACA))


SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]


@pytest.mark.parametrize(
    ("record", "given"),
    [
        ({"conversations": SHAREGPT}, None),
        ({"conversations": SHAREGPT}, "conversations"),
        ({"messages": SHAREGPT}, None),
        ({"id": 1, "conversation": SHAREGPT}, None),
    ],
)
def test_messages_of_sharegpt_are_named(tmp_path: Path, record: dict[str, Any], given: str | None) -> None:
    with pytest.raises(
        DataError,
        match=r"line 1: the messages of field '\w+' have 'from' and 'value', .*\. Write .* 'role' and 'content'",
    ):
        load_rows(write(tmp_path, record), prompt_field=given)
