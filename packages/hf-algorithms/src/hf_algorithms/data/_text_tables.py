"""Tables in text: JSONL, one JSON document, and CSV. An index has the place of each record in the file."""

from __future__ import annotations

import csv
import mmap
import os
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from hf_algorithms.data._json_records import parse_object
from hf_protocols.errors import DataError
from hf_protocols.validation import show

__all__ = ["CsvTable", "JsonLinesTable", "JsonTable"]


class _IndexedFile:
    """A file whose records lie between offsets. It stays open, so that a file put in its place does no harm."""

    def __init__(self, path: Path, shown: str) -> None:
        self.shown = shown
        self._file = path.open("rb")
        self._opened = self._state()
        self._starts = array("Q")
        self._ends = array("Q")

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, row: int) -> bytes:
        """The bytes of a record."""
        start, end = self._starts[row], self._ends[row]
        return os.pread(self._file.fileno(), end - start, start)

    def check_unchanged(self) -> None:
        """Refuses a file that was written to since it was indexed."""
        if self._state() != self._opened:
            raise DataError(f"{self.shown}: the file was changed after it was opened. Start again")

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Every line of the file and its offset."""
        self._file.seek(0)
        offset = 0
        for line in self._file:
            yield offset, line
            offset += len(line)

    def mapped(self) -> mmap.mmap:
        """Maps the whole file into memory; pages are loaded when they are used."""
        return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def add(self, start: int, end: int) -> None:
        """Enters the next record."""
        self._starts.append(start)
        self._ends.append(end)

    def _state(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns


class JsonLinesTable:
    """One JSON object a line; lines without content may end the file."""

    format = "JSONL"

    def __init__(self, path: Path, shown: str) -> None:
        self._index = _IndexedFile(path, shown)
        blank: int | None = None
        for number, (offset, line) in enumerate(self._index.lines(), start=1):
            if not line.strip():
                blank = blank or number
                continue
            if blank is not None:
                raise DataError(f"{shown}, line {blank} is empty: every line is one JSON object. Delete the line")
            self._index.add(offset, offset + len(line))

    def __len__(self) -> int:
        return len(self._index)

    def where(self, row: int) -> str:
        return f"{self._index.shown}, line {row + 1}"

    def record(self, row: int) -> Mapping[str, Any]:
        self._index.check_unchanged()
        return parse_object(self._index.read(row).rstrip(b"\r\n"), where=self.where(row))

    def records(self) -> Iterator[Mapping[str, Any]]:
        return map(self.record, range(len(self)))


_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_WRAPPER = re.compile(rb'\s*+(?:\xef\xbb\xbf)?\s*+(?:\{\s*+"data"\s*+:\s*+)?\[')
_ARRAY = "A JSON array of rows has objects only, with one comma between them"


class JsonTable:
    """A JSON array of objects, or an object whose only key, `data`, holds one."""

    format = "JSON"

    def __init__(self, path: Path, shown: str) -> None:
        self._index = _IndexedFile(path, shown)
        content = self._index.mapped()
        begin = _WRAPPER.match(content)
        if begin is None:
            raise DataError(
                f"{shown}: is a JSON object, not a list of rows. Data in JSON is an array of objects, or an "
                'object {"data": [...]} with one and no other key; JSONL has one object a line'
            )
        self._find_objects(content, begin.end())

    def _find_objects(self, content: mmap.mmap, begin: int) -> None:
        depth, start, last = 0, begin, begin
        for token in _TOKENS.finditer(content, begin):
            mark = token.group()
            if mark in (b"{", b"["):
                if depth == 0:
                    self._check_between(content, last, token.start())
                    start = token.start()
                depth += 1
            elif mark in (b"}", b"]"):
                depth -= 1
                if depth < 0:
                    self._check_end(content, last, token)
                    return
                if depth == 0:
                    last = token.end()
                    self._index.add(start, last)
        raise DataError(f"{self._index.shown}: the JSON array does not end: the file is cut short. Fetch it again")

    def _check_between(self, content: mmap.mmap, begin: int, end: int) -> None:
        between = content[begin:end].strip()
        if between != (b"," if len(self._index) else b""):
            raise DataError(
                f"{self.where(len(self._index))}: {show(between.decode(errors='replace'))} stands before it. {_ARRAY}"
            )

    def _check_end(self, content: mmap.mmap, last: int, end: re.Match[bytes]) -> None:
        surplus = content[last : end.start()].strip() or content[end.end() :].strip().removeprefix(b"}")
        if surplus or end.group() != b"]":
            found = show((surplus or end.group()).decode(errors="replace"))
            raise DataError(f"{self._index.shown}: {found} stands after its last row, {len(self)}. {_ARRAY}")

    def __len__(self) -> int:
        return len(self._index)

    def where(self, row: int) -> str:
        return f"{self._index.shown}, row {row + 1}"

    def record(self, row: int) -> Mapping[str, Any]:
        self._index.check_unchanged()
        return parse_object(self._index.read(row), where=self.where(row))

    def records(self) -> Iterator[Mapping[str, Any]]:
        return map(self.record, range(len(self)))


class CsvTable:
    """Comma-separated values with a header. Every value is text; an empty one is absent."""

    format = "CSV"

    def __init__(self, path: Path, shown: str, *, delimiter: str | None = None) -> None:
        csv.field_size_limit(sys.maxsize)
        self._index = _IndexedFile(path, shown)
        self._numbers = array("Q")
        self._delimiter = delimiter or ","
        self._header: list[str] = []
        for (start, number), end, values in self._scan(delimiter):
            if not self._header:
                self._header = self._read_header(values)
            elif values:
                self._numbers.append(number)
                self._index.add(start, end)
                self._check_width(len(self._numbers) - 1, values)

    def _scan(self, delimiter: str | None) -> Iterator[tuple[tuple[int, int], int, list[str]]]:
        """Yields offset and line of each record, its end, and its values."""
        end = number = 0

        def feed() -> Iterator[str]:
            nonlocal end, number
            for offset, line in self._index.lines():
                end, number = offset + len(line), number + 1
                yield _decode(line, f"{self._index.shown}, line {number}")

        lines = feed()
        first = next(lines, "")
        if delimiter is None:
            self._delimiter = max(",;\t", key=first.count)
        records = self._parse(chain([first] if first else [], lines))
        begin = (0, 1)
        while True:
            try:
                values = next(records, None)
            except csv.Error as error:
                raise DataError(
                    f"{self._index.shown}, line {begin[1]} is not CSV: {error}. Close every quote that opens there"
                ) from error
            if values is None:
                return
            yield begin, end, values
            begin = (end, number + 1)

    def _parse(self, lines: Iterable[str]) -> Iterator[list[str]]:
        return csv.reader(lines, delimiter=self._delimiter, strict=True)

    def _read_header(self, values: list[str]) -> list[str]:
        names = [each.strip() for each in values]
        twice = next((each for each in names if names.count(each) > 1), None)
        if not any(names) or twice is not None:
            problem = "its header is empty" if twice in (None, "") else f"its header has the column {show(twice)} twice"
            raise DataError(f"{self._index.shown}: {problem}. The first line names each column once")
        return names

    def _check_width(self, row: int, values: list[str]) -> None:
        if len(values) != len(self._header):
            raise DataError(
                f"{self.where(row)} has {len(values)} values, the header names {len(self._header)} columns. "
                "Put a value that contains the separator or a line break in quotes"
            )

    def __len__(self) -> int:
        return len(self._index)

    def where(self, row: int) -> str:
        return f"{self._index.shown}, line {self._numbers[row]}"

    def record(self, row: int) -> Mapping[str, Any]:
        self._index.check_unchanged()
        text = _decode(self._index.read(row), self.where(row))
        values = next(self._parse([text]))
        return {name: value or None for name, value in zip(self._header, values, strict=True)}

    def records(self) -> Iterator[Mapping[str, Any]]:
        return map(self.record, range(len(self)))


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8: byte {error.start + 1} of the line is {line[error.start]:#04x}. Save it as UTF-8"
        ) from error
