"""`metrics.jsonl` of a run that may still grow: every byte is parsed once, and a long file is sampled before."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hf_algorithms.report._json_values import parse_json, read_number

__all__ = ["MetricsFile", "parse_row"]

_MOST_NOTES = 5
_SAMPLED_FROM_BYTES = 4 << 20
"""A file with more unparsed bytes is sampled, so that the first look at it takes the same time at any length."""
_NUM_SAMPLED = 800
_LONGEST_LINE = 1 << 20


class MetricsFile:
    """The numbers of `metrics.jsonl` by name, one value an iteration; NaN where a line has no value.

    `refresh` reads what was appended since. A file that shrank or was replaced is read from its beginning; after it
    was deleted, the values read before are kept.

    Args:
        path: of the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._size = 0
        self._num_lines = 0
        self._columns: dict[str, array[float]] = {}
        self._iterations: array[float] = array("d")
        self._sampled: list[Mapping[str, float]] = []
        self._notes: list[str] = []
        self.exists = False

    @property
    def num_rows(self) -> int:
        """Lines that were parsed."""
        return len(self._iterations)

    @property
    def share_read(self) -> float:
        """Share of the file's bytes that were parsed, 1 when `columns` are exact."""
        return min(1.0, self._offset / self._size) if self._size else 1.0

    @property
    def notes(self) -> Sequence[str]:
        """One sentence for each of the first lines that could not be read."""
        return tuple(self._notes)

    @property
    def version(self) -> str:
        """Changes when there is something else to show."""
        shown = "sample" if self._is_sampled else self._offset
        return f"{self._identity}:{shown}:{len(self._notes)}:{self.exists}"

    @property
    def last(self) -> Mapping[str, float]:
        """The newest row, finite values only; empty before the first one."""
        if self._is_sampled:
            return self._sampled[-1]
        if not self.num_rows:
            return {}
        row = {name: values[-1] for name, values in self._columns.items() if math.isfinite(values[-1])}
        return {"iteration": self._iterations[-1], **row}

    def columns(self) -> tuple[Sequence[float], Mapping[str, Sequence[float]]]:
        """Returns iterations, and the values of every metric at each; of a long file that is being read, a sample."""
        if not self._is_sampled:
            return self._iterations, self._columns
        names = dict.fromkeys(name for row in self._sampled for name in row if name != "iteration")
        iterations = [row.get("iteration", math.nan) for row in self._sampled]
        return iterations, {name: [row.get(name, math.nan) for row in self._sampled] for name in names}

    @property
    def _is_sampled(self) -> bool:
        return bool(self._sampled)

    def refresh(self, max_bytes: int | None = None, *, has_ended: bool = False) -> bool:
        """Parses what is new, at most `max_bytes` of it; returns True if more is left.

        A last line without its end is left for the next call, since the run may be writing it; with `has_ended` it is
        read like the others.
        """
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                identity = (stat.st_dev, stat.st_ino)
                if identity != self._identity or stat.st_size < self._offset:
                    self._reset()
                    self._identity = identity
                self.exists, self._size = True, stat.st_size
                left = self._size - self._offset
                if max_bytes is not None and not self._sampled and left > _SAMPLED_FROM_BYTES:
                    self._sampled = _sample_rows(file, self._size)
                file.seek(self._offset)
                chunk = file.read(left if max_bytes is None else max_bytes)
                if has_ended and chunk and not chunk.endswith(b"\n") and self._offset + len(chunk) >= self._size:
                    chunk += b"\n"
        except OSError as error:
            self.exists = False
            if not isinstance(error, FileNotFoundError):
                self._note(f"metrics.jsonl cannot be read: {error.strerror}")
            return False
        is_whole = self._offset + len(chunk) >= self._size
        if not is_whole and b"\n" not in chunk:
            return self.refresh(2 * len(chunk))  # one line is longer than the limit
        self._take(chunk[: chunk.rfind(b"\n") + 1])
        if is_whole:
            self._sampled = []
        return not is_whole

    def _take(self, lines: bytes) -> None:
        rows = []
        for line in lines.splitlines():
            self._num_lines += 1
            row = parse_row(line)
            if row is None:
                self._note(f"metrics.jsonl, line {self._num_lines}, is not a JSON object")
            else:
                rows.append(row)
        self._append(rows)
        self._offset += len(lines)

    def _append(self, rows: Sequence[Mapping[str, float]]) -> None:
        before, nan = self.num_rows, math.nan
        for number, row in enumerate(rows, start=before + 1):
            self._iterations.append(row.get("iteration", float(number)))
        for name in set().union(*rows) - {"iteration", *self._columns}:
            self._columns[name] = array("d", [nan]) * before
        for name, values in self._columns.items():
            values.extend([row.get(name, nan) for row in rows])

    def _note(self, text: str) -> None:
        if len(self._notes) < _MOST_NOTES and text not in self._notes:
            self._notes.append(text)


def parse_row(line: bytes | str) -> dict[str, float] | None:
    """Returns the numbers, at most 1e300 in size, of a line of `metrics.jsonl`; None if it is not a JSON object."""
    try:
        body: Any = parse_json(line)
    except ValueError:
        return None
    if not isinstance(body, dict):
        return None
    return {name: number for name, value in body.items() if (number := read_number(value)) is not None}


def _sample_rows(file: BinaryIO, size: int) -> list[Mapping[str, float]]:
    """Rows at even distances in the file, its first and its last one among them."""
    found: list[Mapping[str, float]] = []
    for number in range(_NUM_SAMPLED):
        file.seek(size * number // _NUM_SAMPLED)
        if number:
            file.readline(_LONGEST_LINE)
        if row := parse_row(file.readline(_LONGEST_LINE)):
            found.append(row)
    tail = min(size, _LONGEST_LINE)
    file.seek(size - tail)
    lines = [line for line in file.read(tail).split(b"\n")[:-1][-2:] if line]
    found += [row for line in lines if (row := parse_row(line))]
    unique = {row["iteration"]: row for row in found if "iteration" in row}
    return [unique[iteration] for iteration in sorted(unique)]
