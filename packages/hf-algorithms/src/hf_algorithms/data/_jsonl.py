"""One JSON object per line: a prompt and the answer that a reward function sees."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hf_algorithms.atomic_files import write_text
from hf_protocols.arguments import shorten_list, show
from hf_protocols.errors import DataError
from hf_protocols.outer_files import HEAD_BYTES, describe_stand_in

__all__ = ["Message", "Row", "load_rows", "read_records", "write_rows"]

_WANTED = "Data is a JSONL file, one JSON object per line"


Message = Mapping[str, Any]
"""One message of a chat: `role`, `content`, and further keys that the chat template knows."""


@dataclass(frozen=True)
class Row:
    """A prompt, and what rewards see next to it.

    Attributes:
        prompt: text, or the messages of a chat.
        answer: reference answer; None if the data has none.
        columns: all other columns by name, as JSON values.
    """

    prompt: str | tuple[Message, ...]
    answer: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


def load_rows(path: str | Path, *, prompt_field: str = "prompt", answer_field: str = "answer") -> list[Row]:
    """Read every line of a JSONL file; row i of the result is line i + 1 of the file.

    Numbers become text (``{"answer": 122}`` is ``"122"``); fields that are not asked for are ignored.

    Raises:
        DataError: for a file that is not a regular one, cannot be read, is of another format or has no rows, and,
            naming the file and the line, for an empty line, one that is not a JSON object in UTF-8, and a field that is
            missing or neither text nor a number.
    """
    rows = [_row_of(record, (prompt_field, answer_field), where=where) for where, record in read_records(path)]
    if not rows:
        raise DataError(f"{path} has no rows. {_WANTED}")
    return rows


def read_records(path: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields where a record stands, such as `train.jsonl, line 3`, and the record, row by row.

    Raises:
        DataError: as `load_rows` does, but for the fields.
    """
    try:
        _check_kind(Path(path), path)
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}, line {number}"
                yield where, _parse_line(line, where=where)
    except OSError as error:
        raise DataError(f"{path}: {_reason(error)}. {_WANTED}") from error


def write_rows(
    path: str | Path, rows: Iterable[Row], *, prompt_field: str = "prompt", answer_field: str = "answer"
) -> Path:
    """Write rows so that :func:`load_rows` reads them back; the file appears whole or not at all.

    Raises:
        DataError: when the file cannot be written.
    """
    lines = (
        json.dumps({prompt_field: row.prompt, answer_field: row.answer}, ensure_ascii=False) + "\n" for row in rows
    )
    try:
        return write_text(path, "".join(lines))
    except OSError as error:
        raise DataError(f"{path} cannot be written: {_reason(error)}") from error


def _check_kind(path: Path, shown: str | Path) -> None:
    """Refuses what would be waited for, or read without an end, and files of another format."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{shown}: is not a regular file. {_WANTED}")
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    kind = "is text in UTF-16. Save it as UTF-8" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else None
    if head and (kind := kind or describe_stand_in(head)) is not None:
        raise DataError(f"{shown}: {kind}. {_WANTED}")


def _parse_line(line: bytes, *, where: str) -> Mapping[str, Any]:
    if not line.strip():
        raise DataError(f"{where} is empty: every line is one JSON object; delete the line")
    try:
        # A byte order mark is not part of the data, wherever files were joined.
        record = json.loads(line.decode("utf-8-sig"), parse_constant=_reject_constant)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8: byte {error.start + 1} of the line is {line[error.start]:#04x}"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error.msg} at column {error.colno}: {_excerpt(line)}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}: {_excerpt(line)}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is a JSON {_kind(record)}, not an object: {_excerpt(line)}")
    return record


def _row_of(record: Mapping[str, Any], fields: tuple[str, str], *, where: str) -> Row:
    prompt_field, answer_field = fields
    return Row(
        prompt=_text_of(record, prompt_field, knob="data.prompt_field", where=where),
        answer=_text_of(record, answer_field, knob="data.answer_field", where=where),
    )


def _text_of(record: Mapping[str, Any], field: str, *, knob: str, where: str) -> str:
    if field not in record:
        there = ", ".join(shorten_list([show(name) for name in record])) or "none"
        raise DataError(f"{where} has no field {show(field)}; its fields are {there}. Set {knob}")
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DataError(f"{where}: field {show(field)} is a JSON {_kind(value)}, not text or a number. Set {knob}")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {show(field)} has half of a surrogate pair, {show(text[error.start])}, which "
            f"is no character"
        ) from error
    return text


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    return {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}.get(type(value), "object")


def _excerpt(line: bytes) -> str:
    return show(line.decode("utf-8", errors="replace").strip())


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
