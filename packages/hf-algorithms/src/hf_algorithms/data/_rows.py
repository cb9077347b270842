"""Rows: a prompt, the answer that a reward sees, and all other columns. They are read from their files one by one."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from hf_algorithms.atomic_files import write_text
from hf_algorithms.data._arrow_tables import Binary
from hf_algorithms.data._columns import (
    ColumnMapping,
    Kind,
    check_blanks,
    find_columns,
    get_field,
    has_answers_in_chats,
    is_chat,
    refuse_sharegpt,
)
from hf_algorithms.data._file_rows import FileRows
from hf_algorithms.data._json_records import SpelledNumber, describe_json_kind
from hf_algorithms.data._tables import FORMATS, Table, open_tables
from hf_protocols.errors import DataError
from hf_protocols.validation import show

__all__ = [
    "SAMPLE_RECORDS",
    "Message",
    "PromptRows",
    "Row",
    "RowFile",
    "check_characters",
    "load_rows",
    "locate_row",
    "open_rows",
    "read_message",
    "read_records",
    "write_rows",
]

SAMPLE_RECORDS = 100
"""Records by which columns are found."""


Message = Mapping[str, Any]
"""One message of a chat: `role`, `content`, and further keys that the chat template knows."""


@dataclass(frozen=True)
class Row:
    """A prompt, and what rewards see next to it.

    Attributes:
        prompt: text, or the messages of a chat; empty for a text to pretrain on, which is the answer.
        answer: reference answer; None where the data does not have one.
        columns: all other columns by name, as JSON values.
    """

    prompt: str | tuple[Message, ...]
    answer: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """A file of rows: its path as given, its records, what its columns hold, and the number of its source."""

    path: str
    table: Table
    columns: ColumnMapping
    source: int = 0
    is_learned: bool = False
    """A response with which `messages` end is the answer, also where a column has another one."""

    def describe(self) -> str:
        """One line, such as `train.csv is CSV of 7,473 rows: prompts; prompt = 'question', answer = 'answer'`."""
        return f"{self.path} is {self.table.format} of {len(self.table):,} rows: {self.columns.describe()}"

    def build_row(self, record: Mapping[str, Any], number: int) -> Row:
        """Returns the row of a record.

        Raises:
            DataError: for a record that lacks a prompt or has a field of another kind.
        """
        return _build_row(record, self.columns, self.table, number, is_learned=self.is_learned)


class PromptRows(FileRows[Row]):
    """Prompts, or texts to pretrain on, of one or more files."""

    files: tuple[RowFile, ...]


def open_rows(
    sources: Iterable[tuple[str, float | None]],
    *,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    promptless: Collection[Kind] = (),
    is_learned: bool = False,
) -> PromptRows:
    """Opens files of rows and finds their columns; reads only the first rows of each.

    Args:
        sources: a path, a pattern such as `data/*.jsonl`, or a hub name, and its weight or None.
        prompt_field: field of the prompt; None: found by its name.
        answer_field: field of the answer; None: found by its name.
        promptless: kinds of rows that may lack a prompt: `texts` to pretrain on, `preferences`.
        is_learned: answers are what a model learns to write. A `completion` then counts before an `answer`, and the
            response with which `messages` end before both, unless `answer_field` names one.

    Raises:
        DataError: for a file that cannot be opened or is empty, and for ambiguous columns.
    """
    files, weights = [], []
    for number, (path, weight) in enumerate(sources):
        weights.append(weight)
        for each, table in open_tables(path):
            if not len(table):
                raise DataError(f"{each} has no rows. Data is {FORMATS}")
            columns = find_columns(
                list(islice(table.records(), SAMPLE_RECORDS)),
                where=table.where(0),
                prompt_field=prompt_field,
                answer_field=answer_field,
                promptless=promptless,
                is_learned=is_learned,
            )
            prefers_chats = is_learned and answer_field is None
            files.append(RowFile(path=each, table=table, columns=columns, source=number, is_learned=prefers_chats))
    given = [each for each in weights if each is not None]
    return PromptRows(files, given or None)


def load_rows(path: str | Path, *, prompt_field: str | None = None, answer_field: str | None = None) -> list[Row]:
    """Reads every row of a file in any format that `open_rows` takes.

    Raises:
        DataError: for a file that is not a regular one, cannot be read, is of no format that is read or has no rows,
            and, naming file and line, for a record that is malformed or lacks a prompt.
    """
    return list(open_rows([(str(path), None)], prompt_field=prompt_field, answer_field=answer_field))


def read_records(path: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields where a record stands, such as `train.jsonl, line 3`, and the record, row by row, in any format.

    A path may be a pattern. A decimal number keeps its spelling as `str(value.spelling)` of a `float`.

    Raises:
        DataError: as `load_rows` does, except for the fields.
    """
    for _, table in open_tables(path):
        for row, record in enumerate(table.records()):
            yield table.where(row), record


def locate_row(rows: Sequence[Row], index: int, *, source: str) -> str:
    """Place of a row for messages: that in its file, or in the order of `source`."""
    return rows.where(index) if isinstance(rows, PromptRows) else f"{source}, line {index + 1}"


def write_rows(
    path: str | Path, rows: Iterable[Row], *, prompt_field: str = "prompt", answer_field: str = "answer"
) -> Path:
    """Writes rows so that `load_rows` reads them back; the file appears whole or not at all.

    Raises:
        DataError: when the file cannot be written.
    """
    objects = (
        {prompt_field: row.prompt, **({} if row.answer is None else {answer_field: row.answer}), **row.columns}
        for row in rows
    )
    lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in objects)
    try:
        return write_text(path, "".join(lines))
    except OSError as error:
        raise DataError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from error


def _build_row(record: Mapping[str, Any], columns: ColumnMapping, table: Table, row: int, *, is_learned: bool) -> Row:
    try:
        others = {name: record[name] for name in columns.others if name in record}
        answer = None if columns.answer is None else _read_answer(record, columns.answer, is_learned=is_learned)
        if columns.prompt is None:
            if not answer and columns.kind == "texts":
                raise DataError(": its text is empty. Remove the row")
            return Row("", answer, others)
        check_blanks(record, columns.blanks)
        prompt, written = _read_prompt(record, columns.prompt)
        if answer is None or (is_learned and written is not None):
            answer = written
        return Row(prompt, answer, others)
    except DataError as error:
        raise DataError(f"{table.where(row)}{error}") from None


def _read_prompt(record: Mapping[str, Any], name: str) -> tuple[str | tuple[Message, ...], str | None]:
    """The prompt, and the response with which `messages` end, if they do. In a `prompt` it is a text to go on from."""
    value = get_field(record, name)
    if value is None and name not in record:
        raise DataError(
            f" has no field {show(name)}; its fields are {', '.join(map(show, record))}. Add the field, or set "
            "data.prompt_field to the one that every row has"
        )
    _check_messages(value, name)
    if not is_chat(value):
        return _read_text(value, name, wanted="text, a number or a list of messages with roles", role="prompt"), None
    messages = [read_message(each, f": message {number} of field {show(name)}") for number, each in enumerate(value, 1)]
    for message in messages:
        check_characters(json.dumps(message, ensure_ascii=False), name)
    written = None
    if has_answers_in_chats(name) and messages[-1]["role"] == "assistant":
        written = messages.pop().get("content")
    if not messages:
        raise DataError(f": field {show(name)} has no message before the response. Begin a chat with a user's message")
    return tuple(messages), written


def read_message(message: Mapping[str, Any], where: str) -> Message:
    """Returns a message whose content is text: parts are joined, and a number is as it is written.

    Args:
        message: it may lack content where it has something else to say, such as a call of a tool.
        where: of the message, for errors.

    Raises:
        DataError: for content that is not text, and for a user's message without any.
    """
    kept = {key: part for key, part in message.items() if part is not None}
    content = kept.get("content")
    if content is None:
        if kept.keys() <= {"role"} and kept.get("role") != "assistant":
            raise DataError(f"{where} has no content. Write its text, or remove the message")
    elif isinstance(content, list | tuple):
        kept["content"] = "".join(_read_part(part, where) for part in content)
    elif not isinstance(content, str):
        if isinstance(content, bool) or not isinstance(content, int | float):
            raise DataError(f"{where} has a JSON {describe_json_kind(content)} as content, not text. Correct it")
        kept["content"] = text = content.spelling if isinstance(content, SpelledNumber) else str(content)
        if isinstance(content, float) and content - content != 0:
            raise DataError(f"{where} has {text} as content, not a finite number. Correct it")
    return kept


def _read_part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if isinstance(text, str) and (not isinstance(part, Mapping) or part.get("type", "text") == "text"):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else None
    named = f"a part of type {show(kind)}" if isinstance(kind, str) else f"a part that is {show(part)}"
    raise DataError(f"{where} has {named}, and only text is read. Remove the part or the row")


def _check_messages(value: object, name: str) -> None:
    """Refuses a list that is almost a chat."""
    if not isinstance(value, list | tuple):
        return
    if not value:
        raise DataError(f": field {show(name)} is an empty list, which holds no message. Remove the row")
    refuse_sharegpt(value, f": the messages of field {show(name)}")
    if all(isinstance(each, Mapping) for each in value) and not is_chat(value):
        number = next(n for n, each in enumerate(value, start=1) if not isinstance(each.get("role"), str))
        raise DataError(f": message {number} of field {show(name)} has no role. Add one, such as 'user'")


def _read_answer(record: Mapping[str, Any], name: str, *, is_learned: bool) -> str | None:
    """The answer as text: a number as it is written, a response in messages by its content, other JSON as JSON."""
    value = get_field(record, name)
    if value is None:
        return None
    if is_chat(value) and len(value) == 1 and isinstance(value[0].get("content"), str):
        value = value[0]["content"]
    elif is_learned and is_chat(value):
        raise DataError(
            f": field {show(name)} is a chat of {len(value)} messages, where one text of the assistant is learned. "
            "Write the whole chat as messages"
        )
    elif isinstance(value, bool | list | tuple | Mapping):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise DataError(f": field {show(name)} holds NaN or Infinity. Correct the row") from None
    return _read_text(value, name, wanted="text or a number", role="answer")


def _read_text(value: object, name: str, *, wanted: str, role: str) -> str:
    if value is None:  # null in JSON, an empty value in CSV
        raise DataError(f": field {show(name)} has no value. Fill it in, or remove the row")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = describe_json_kind(value)
        raise DataError(
            f": field {show(name)} is a JSON {kind}, not {wanted}. Correct the row, or set data.{role}_field to "
            "another field"
        )
    if isinstance(value, float) and value - value != 0:
        spelling = value.spelling if isinstance(value, SpelledNumber) else value
        raise DataError(f": field {show(name)} is {spelling}, not a finite number. Correct the row")
    if isinstance(value, Binary):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise DataError(f": field {show(name)} is binary and not UTF-8. Store it as text") from None
    text = value.spelling if isinstance(value, SpelledNumber) else str(value)
    check_characters(text, name)
    return text


def check_characters(text: str, name: str) -> None:
    """Refuses a text of a field that cannot be written as UTF-8; the message follows the place of the row."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f": field {show(name)} contains an unpaired surrogate, {show(text[error.start])}, which is not a "
            "character. Remove it"
        ) from None
