"""Measured tables: CSV files recognised by their columns, and their cells as numbers."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_protocols import ConfigError

__all__ = ["MeasuredTable", "SkipRow", "find_kind", "is_marked", "number", "read_tables", "whole_number"]

Row = Mapping[str, str]

_SIZES = ("params_b", "layers", "model")
_NEEDED = {
    "training": ("gpu", "n_gpus", "global_batch", "seq_len", "step_time_s"),
    "memory": ("gpu", "n_gpus", "tp", "pp", "micro_batch", "seq_len", "activation_gib"),
    "generation": ("gpu", "tp", "batch", "input_len", "output_len"),
    "communication": ("gpu", "collective", "num_workers", "devices_per_node", "bytes", "time_ms_median_maxrank"),
    "kernel": ("gpu", "num_tokens", "tp", "n_embd", "n_expanded_embd", "mlp_up_proj_ms"),
    "iteration": ("gpu", "n_gpus", "algorithm", "rollout_samples", "step_time_s"),
}
_UNMARKED = ("", "0", "false", "no", "n", "none", "off", "-", "n/a", "nan")
GENERATION_TIMES = ("latency_s", "ttft_min_s", "itl_p50_s", "prompt_time_ms_median", "token_time_ms_median")
_MARKS = {
    "communication": ("time_ms_median_maxrank",),
    "kernel": ("mlp_up_proj_ms",),
    "iteration": ("rollout_samples",),
    "generation": GENERATION_TIMES,
    "memory": ("activation_gib",),
    "training": ("step_time_s",),
}
"""A table is of the first kind that has one of these columns."""


class SkipRow(Exception):  # noqa: N818 - it is no error: it carries the reason for which a row is not used
    """A row that cannot be compared; its text is the reason."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """One file: its name, what kind of measurement it holds, and its rows as texts by column."""

    file: str
    kind: str
    rows: tuple[Row, ...]


def read_tables(folder: Path) -> list[MeasuredTable]:
    """Every ``*.csv`` of ``folder``, by name, in capitals too.

    Raises:
        ConfigError: for a folder that cannot be read or holds no table, or a table without the columns it needs.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: give the one that holds the measured tables (*.csv)")
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".csv")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error}") from error
    if not paths:
        raise ConfigError(f"{folder} holds no measured table: give a folder with *.csv files")
    return [_read_table(path) for path in paths]


def find_kind(file: str, columns: Sequence[str]) -> str:
    """What kind of measurement a table with these columns holds.

    Raises:
        ConfigError: where no kind fits, or one that fits lacks columns.
    """
    for kind, marks in _MARKS.items():
        if not set(marks) & set(columns):
            continue
        missing = [column for column in _NEEDED[kind] if column not in columns]
        if kind in ("training", "memory", "generation") and not set(_SIZES) & set(columns):
            missing.append("params_b (or layers, hidden and heads, or model)")
        if missing:
            raise ConfigError(f"{file}: this {kind} table lacks {', '.join(missing)}")
        return kind
    raise ConfigError(
        f"{file}: no measured time among its columns; give one of step_time_s, activation_gib, "
        f"{', '.join(GENERATION_TIMES)} or time_ms_median_maxrank"
    )


def is_marked(row: Row, column: str) -> bool:
    """Whether a cell says more than "no": tables mark rows by 1, by True, or by the reason."""
    return row.get(column, "").lower() not in _UNMARKED


def number(row: Row, column: str, default: float | None = None) -> float:
    """A cell above zero; ``default`` where it is blank or there is no such column.

    Raises:
        SkipRow: for a blank cell without default, or one that is no number above zero.
    """
    text = (row.get(column) or "").strip()
    if not text:
        if default is None:
            raise SkipRow(f"{column} is blank")
        return default
    try:
        found = float(text)
    except ValueError:
        raise SkipRow(f"{column} is no number") from None
    if not math.isfinite(found) or found <= 0:
        raise SkipRow(f"{column} is not above 0")
    return found


def whole_number(row: Row, column: str, default: int | None = None) -> int:
    """A cell that counts something; as ``number``.

    Raises:
        SkipRow: as ``number``, and for a fraction.
    """
    found = number(row, column, default)
    if found != int(found):
        raise SkipRow(f"{column} is no whole number")
    return int(found)


def _read_table(path: Path) -> MeasuredTable:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns, rows = reader.fieldnames or (), tuple(_strip(reader))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a table: {error}") from error
    return MeasuredTable(file=path.name, kind=find_kind(path.name, columns), rows=rows)


def _strip(reader: csv.DictReader[str]) -> Iterator[Row]:
    for row in reader:
        yield {key: (value or "").strip() for key, value in row.items() if key is not None}
