from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_algorithms.config import DataConfig
from hf_algorithms.data import Row, load_rows, write_rows
from hf_algorithms.preflight.inputs import load_row_sets
from hf_protocols.errors import DataError


def _file(tmp_path, content: bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    return path


def test_rows_survive_writing_and_reading(tmp_path):
    rows = [Row("37+85=", "122"), Row('quote " and \u2028 separator', "\u00e9\U0001f600"), Row("two\nlines", "")]
    path = write_rows(tmp_path / "new" / "rows.jsonl", rows, prompt_field="q", answer_field="a")
    assert load_rows(path, prompt_field="q", answer_field="a") == [
        replace(row, columns={"a": row.answer}) for row in rows
    ]
    assert [entry.name for entry in path.parent.iterdir()] == ["rows.jsonl"]


def test_numbers_become_text_and_other_fields_are_columns(tmp_path):
    path = _file(tmp_path, b'\xef\xbb\xbf{"prompt": 1, "answer": 2.5, "id": null}\r\n{"answer": -3, "prompt": "x"}')
    assert load_rows(path) == [Row("1", "2.5", {"id": None}), Row("x", "-3")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"", "is empty"),
        (b"   ", "is empty"),
        (b'{"prompt": "a"', "is not JSON"),
        (b'{"prompt": "a", "answer": NaN}', "field 'answer' is NaN, not a finite number"),
        (b'{"prompt": "a", "answer": {"b": [NaN]}}', "field 'answer' holds NaN or Infinity"),
        (b'{"prompt": "a", "answer": 1e400}', "the number 1e400 is outside the range of a float"),
        (b'{"prompt": "a", "answer": "b", "prompt": "c"}', "the key 'prompt' stands twice in one object"),
        (b'{"prompt": [{"content": "a"}]}', "message 1 of field 'prompt' has no role"),
        (b"[" * 100_000, "nests too deeply"),
        (b'{"prompt": "a', "is not JSON: Unterminated string starting at column 12"),
        (b'{"prompt": "\xff", "answer": "b"}', "is not UTF-8: byte 13 of the line is 0xff"),
        (b'["a", "b"]', "is a JSON array, not an object"),
        (b"3", "is a JSON number, not an object"),
        (
            b'{"question": "a", "answer": "b"}',
            "no field 'prompt'; its fields are 'question', 'answer'. Add the field, or set data.prompt_field",
        ),
        (b'{"prompt": null, "answer": "b"}', "field 'prompt' has no value. Fill it in, or remove the row"),
        (b'{"prompt": true, "answer": "b"}', "field 'prompt' is a JSON boolean"),
        (b'{"prompt": {}, "answer": "b"}', "field 'prompt' is a JSON object"),
        (b'{"prompt": "\\ud83d", "answer": "b"}', "contains an unpaired surrogate"),
        (b'{"prompt": [{"role": "user", "content": "a", "name": "\\ud83d"}]}', "contains an unpaired surrogate"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, says):
    good = b'{"prompt": "a", "answer": "b"}\n'
    path = _file(tmp_path, good + line + b"\n" + good)
    with pytest.raises(DataError) as caught:
        load_rows(path)
    assert str(caught.value).startswith(f"{path}, line 2")
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_one_message(tmp_path):
    path = _file(tmp_path, b"{}")
    path.chmod(0)
    with pytest.raises(DataError, match="permission denied"):
        load_rows(path)


def test_missing_empty_and_foreign_files_are_one_message(tmp_path):
    with pytest.raises(DataError, match=r"absent.jsonl: no such file"):
        load_rows(tmp_path / "absent.jsonl")
    for name in ("$HOME/absent.jsonl", "$HOME/*.jsonl"):
        with pytest.raises(
            DataError, match=r"\. Data is .*\. Variables such as \$HOME are not replaced in a path, but"
        ):
            load_rows(name)
    with pytest.raises(DataError, match="is a directory"):
        load_rows(tmp_path)
    with pytest.raises(DataError, match="has no rows"):
        load_rows(_file(tmp_path, b""))


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, not the file itself"),
        (b"\x1f\x8b\x08\x00", "is compressed with gzip"),
        (b"PAR1\x15\x04", "cannot be read as Parquet"),
        ('{"prompt": "a"}'.encode("utf-16"), "is text in UTF-16. Save it as UTF-8"),
        (b"<!doctype html>", "is a web page"),
    ],
)
def test_a_file_of_another_format_is_named(tmp_path, head, says):
    with pytest.raises(DataError, match=f"rows.jsonl: {says}"):
        load_rows(_file(tmp_path, head))


def test_what_is_not_a_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/null"):
        with pytest.raises(DataError, match=f"^{path}: is not a regular file. Data is JSONL, JSON, CSV"):
            load_rows(path)


def test_data_that_is_absent_is_named_by_key_and_as_written():
    with pytest.raises(DataError, match=r"^data\.train: file:///tmp/absent: no such file"):
        load_row_sets(DataConfig(train="file:///tmp/absent"))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = _file(tmp_path, b"old")

    def rows():
        yield Row("a", "b")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(path, rows())
    assert path.read_bytes() == b"old"
    with pytest.raises(DataError, match="cannot be written"):
        write_rows(path / "below" / "a" / "file", [Row("a", "b")])


def test_an_answer_in_parts_of_text_is_their_text(tmp_path):
    parts = b'[{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]'
    chat = b'{"messages": [{"role": "user", "content": "6*7"}, {"role": "assistant", "content": %s}]}\n'
    (row,) = load_rows(_file(tmp_path, chat % parts))
    assert row.answer == "42"


PARTS = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]


def write_chat(path: Path, *messages: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return path


def test_parts_of_a_message_that_are_text_are_joined(tmp_path: Path) -> None:
    reply = {"role": "assistant", "content": [{"type": "text", "text": "2"}]}
    (row,) = load_rows(write_chat(tmp_path / "a.jsonl", {"role": "user", "content": PARTS}, reply))
    assert (row.prompt, row.answer) == (({"role": "user", "content": "1+1="},), "2")
    call = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    asked = {"role": "user", "content": 1}
    (row,) = load_rows(write_chat(tmp_path / "b.jsonl", asked, call, {"role": "user", "content": "?"}))
    assert row.prompt == ({"role": "user", "content": "1"}, call, {"role": "user", "content": "?"})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([*PARTS, {"type": "image", "url": "x"}], "has a part of type 'image', and only text is read"),
        ([{"type": "text", "text": None}], "has a part of type 'text', and only text is read"),
        ([5], "has a part that is 5, and only text is read"),
        (None, "has no content. Write its text, or remove the message"),
        ({"text": "x"}, "has a JSON object as content, not text"),
        (True, "has a JSON boolean as content, not text"),
        (float("nan"), "has NaN as content, not a finite number"),
    ],
)
def test_content_that_is_not_text_is_refused(content: Any, reason: str, tmp_path: Path) -> None:
    path = write_chat(tmp_path / "a.jsonl", {"role": "user", "content": content})
    with pytest.raises(DataError, match=re.escape(f"a.jsonl, line 1: message 1 of field 'messages' {reason}")):
        load_rows(path)


def test_a_number_of_too_many_digits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "answer": ' + "9" * 5000 + "}\n")
    with pytest.raises(DataError, match=r"line 1: the number 9{20}\.\.\. has 5000 characters. Write it as a string"):
        load_rows(tmp_path / "a.jsonl")
