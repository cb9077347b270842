"""Measured tables: CSV files recognised by their columns, and their cells as numbers."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_protocols import ConfigError

__all__ = ["MeasuredTable", "SkipRow", "find_kind", "find_times", "is_marked", "number", "read_tables", "whole_number"]

Row = Mapping[str, str]

_SIZES = ("params_b", "layers", "model")
_NEEDED = {
    "training": ("gpu", "n_gpus", "global_batch", "seq_len", "step_time_s"),
    "memory": ("gpu", "n_gpus", "tp", "pp", "micro_batch", "seq_len", "activation_gib"),
    "generation": ("gpu", "batch", "input_len", "output_len"),
    "communication": ("gpu", "collective", "num_workers", "devices_per_node", "bytes", "time_ms_median_maxrank"),
    "kernel": ("gpu", "num_tokens", "tp", "n_embd", "n_expanded_embd", "mlp_up_proj_ms"),
    "iteration": ("gpu", "n_gpus", "algorithm", "rollout_samples", "step_time_s"),
}
_UNMARKED = ("", "false", "no", "n", "none", "off", "-", "n/a", "nan")
_MARKS = {
    "communication": "time_ms_median_maxrank",
    "kernel": "mlp_up_proj_ms",
    "iteration": "rollout_samples",
    "generation": "output_len",
    "memory": "activation_gib",
    "training": "step_time_s",
}
"""A table is of the first kind whose column it has; of generation also with another of its times."""
_QUANTITIES = {
    "prefill": ("ttft", "prompt_time", "prefill", "prefill_time", "prefill_latency", "time_to_first_token"),
    "decode": ("itl", "tpot", "tbt", "token_time", "time_per_output_token", "decode_latency", "inter_token_latency"),
    "generation": ("latency", "e2e", "e2e_time", "e2e_latency", "generation_time", "total_time"),
}
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_VALUES = ("min", "median", "p50", "", "mean", "avg")
_MOST = 10**9
"""Nothing that is counted here is more."""


class SkipRow(Exception):  # noqa: N818 - it is not an error: it carries the reason for which a row is not used
    """A row that cannot be compared; its text is the reason."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """One file: its name, what kind of measurement it holds, and its rows as texts by column."""

    file: str
    kind: str
    rows: tuple[Row, ...]


def read_tables(folder: Path) -> list[MeasuredTable]:
    """Every `*.csv` of `folder`, by name, in capitals too.

    Raises:
        ConfigError: for a folder that cannot be read or holds no table, or a table without the columns it needs.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder. Pass the folder that holds the measured tables (*.csv)")
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".csv")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error}") from error
    if not paths:
        raise ConfigError(f"{folder} holds no measured table. Pass a folder with *.csv files")
    return [_read_table(path) for path in paths]


def find_kind(file: str, columns: Sequence[str]) -> str:
    """Returns the kind of measurement that a table with these columns holds.

    Raises:
        ConfigError: where no kind fits, or one that fits lacks columns.
    """
    for kind, mark in _MARKS.items():
        if not (mark in columns or (kind == "generation" and "step_time_s" not in columns and find_times(columns))):
            continue
        missing = [column for column in _NEEDED[kind] if column not in columns]
        if kind in ("training", "memory", "generation") and not set(_SIZES) & set(columns):
            missing.append("params_b (or layers, hidden and heads, or model)")
        if kind == "generation" and not find_times(columns):
            missing.append("a time (latency_s, ttft_s or token_time_s)")
        if missing:
            raise ConfigError(f"{file}: this {kind} table lacks {', '.join(missing)}")
        return kind
    raise ConfigError(
        f"{file}: no measured time among its columns. Use one of step_time_s, activation_gib, latency_s, ttft_s, "
        "token_time_s or time_ms_median_maxrank"
    )


def find_times(columns: Sequence[str]) -> dict[str, tuple[str, float, bool]]:
    """Returns for each measured phase its column, the unit in seconds, and True if it is the least of several.

    A name is a quantity, a unit and perhaps which of several values: `ttft_s`, `itl_p50_s`, `token_time_ms_mean`.
    Of several values the first of `_VALUES` counts; a time from end to end if the name does not say more.
    """
    found: dict[str, tuple[int, str, float, bool]] = {}
    for column in columns:
        words = column.split("_")
        quantity = "_".join(word for word in words if word not in _UNITS and word not in _VALUES)
        units, values = [word for word in words if word in _UNITS], [word for word in words if word in _VALUES]
        phase = next((phase for phase, names in _QUANTITIES.items() if quantity in names), None)
        if phase is None or len(units) != 1 or len(values) > 1:
            continue
        rank = _VALUES.index(values[0]) if values else _VALUES.index("")
        candidate = (rank, column, _UNITS[units[0]], values == ["min"])
        found[phase] = min(found.get(phase, candidate), candidate)
    if len(found) > 1 and found.get("generation", (0, ""))[1].startswith("e2e"):
        del found["generation"]
    return {phase: best[1:] for phase, best in found.items()}


def is_marked(row: Row, column: str) -> bool:
    """True if a cell says more than "no": tables mark rows by 1, by True, or by the reason."""
    text = row.get(column, "").lower()
    try:
        return float(text) != 0 and not math.isnan(float(text))
    except ValueError:
        return text not in _UNMARKED


def number(row: Row, column: str, default: float | None = None) -> float:
    """A cell above zero; `default` where it is blank or there is no such column.

    Raises:
        SkipRow: for a blank cell without default, or one that is not a number above zero, or out of all proportion.
    """
    text = (row.get(column) or "").strip()
    if not text:
        if default is None:
            raise SkipRow(f"{column} is blank")
        return default
    try:
        found = float(text)
    except ValueError:
        raise SkipRow(f"{column} is not a number") from None
    if math.isnan(found) or found <= 0:
        raise SkipRow(f"{column} is not above 0")
    if not 1e-12 <= found <= 1e18:
        raise SkipRow(f"{column} is beyond what can be measured")
    return found


def whole_number(row: Row, column: str, default: int | None = None) -> int:
    """A cell that counts something; as `number`.

    Raises:
        SkipRow: as `number`, for a fraction, and for more than a billion.
    """
    found = number(row, column, default)
    if found != int(found):
        raise SkipRow(f"{column} is not a whole number")
    if found > _MOST:
        raise SkipRow(f"{column} is above a billion")
    return int(found)


def _read_table(path: Path) -> MeasuredTable:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = [name.strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            rows = tuple(_strip(reader))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a table: {error}") from error
    kind = find_kind(path.name, columns)
    if not rows:
        raise ConfigError(f"{path} has columns but no row. Fill it, or take it out of the folder")
    return MeasuredTable(file=path.name, kind=kind, rows=rows)


def _strip(reader: csv.DictReader[str]) -> Iterator[Row]:
    for row in reader:
        yield {key: (value or "").strip() for key, value in row.items() if key is not None}
