"""Tables of records, of any format: opened by content and name, read by row.

A table holds an index of its rows, never their text, so that a file may be larger than memory.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from hf_algorithms.data._arrow_tables import ParquetTable, open_dataset_directory, open_hub_dataset
from hf_algorithms.data._gzip_files import is_gzip, unpack
from hf_algorithms.data._text_tables import CsvTable, JsonLinesTable, JsonTable
from hf_protocols.errors import DataError
from hf_protocols.outer_files import HEAD_BYTES, describe_stand_in
from hf_protocols.paths import explain_variables

__all__ = ["FORMATS", "Table", "open_table", "open_tables"]

FORMATS = "JSONL, JSON, CSV, Parquet, or a directory that `datasets` saved"
"""Formats that are read, for messages."""

_DATASET_FILES = ("state.json", "dataset_dict.json", "dataset_info.json")
_HEADS = {
    b"\xff\xfe": "is text in UTF-16. Save it as UTF-8",
    b"\xfe\xff": "is text in UTF-16. Save it as UTF-8",
    b"\x28\xb5\x2f\xfd": "is compressed with Zstandard. Unpack it",
    b"BZh": "is compressed with bzip2. Unpack it",
    b"\xfd7zXZ\x00": "is compressed with xz. Unpack it",
    b"PK\x03\x04": "is a ZIP archive or a workbook. Unpack it, or save it as CSV",
    b"7z\xbc\xaf\x27\x1c": "is a 7z archive. Unpack it",
    b"ARROW1": "is an Arrow file. Save it as Parquet, or name the directory that `datasets` saved",
    b"\x80\x03": "is a pickle of Python. Save it as JSONL or Parquet",
    b"\x80\x04": "is a pickle of Python. Save it as JSONL or Parquet",
    b"\x80\x05": "is a pickle of Python. Save it as JSONL or Parquet",
}
_TAR_PLACE = 257
_MOST_BLANKS = 1 << 16


class Table(Protocol):
    """Records by number."""

    @property
    def format(self) -> str:
        """Name of the format, such as `JSONL`."""
        ...

    def __len__(self) -> int: ...

    def where(self, row: int) -> str:
        """Place of a row for messages, such as `train.jsonl, line 3`."""
        ...

    def record(self, row: int) -> Mapping[str, Any]:
        """One record; values are those of JSON, and decimal numbers may be `SpelledNumber`."""
        ...

    def records(self) -> Iterator[Mapping[str, Any]]:
        """All records in order."""
        ...


def open_table(path: str | Path) -> Table:
    """Opens a file, a directory that `datasets` saved, or a hub name.

    Raises:
        DataError: for a path without data, a file that is not regular or cannot be read, and content of no format
            that is read; for JSONL, JSON and CSV also for what shows while rows are counted.
    """
    shown, place = str(path), Path(path)
    try:
        if place.is_dir():
            return _open_directory(place, shown)
        if _is_hub_name(shown):
            return open_hub_dataset(shown)
        if place.exists() and not place.is_file():
            raise DataError(f"{shown}: is not a regular file. Data is {FORMATS}")
        return _open_file(place, shown)
    except OSError as error:
        hint = explain_variables(shown)
        raise DataError(f"{shown}: {(error.strerror or str(error)).lower()}. Data is {FORMATS}{hint}") from error


def open_tables(path: str | Path) -> Iterator[tuple[str, Table]]:
    """Opens what a path is, or all files that match a pattern such as `data/*.jsonl`, in the order of their names.

    Yields:
        The path of each, and its table.

    Raises:
        DataError: as `open_table` does, and for a pattern that no file matches.
    """
    shown = str(path)
    found = [shown]
    if glob.has_magic(shown) and not os.path.exists(shown):
        found = sorted(glob.glob(shown, recursive=True))
    if not found:
        raise DataError(f"{shown}: no file matches this pattern. Data is {FORMATS}{explain_variables(shown)}")
    for each in found:
        yield each, open_table(each)


def _open_directory(place: Path, shown: str) -> Table:
    if any((place / name).is_file() for name in _DATASET_FILES):
        return open_dataset_directory(place, shown)
    found = Counter(_read_suffix(each) for each in sorted(place.iterdir()) if each.suffix in _SUFFIXES)
    usual = "".join(suffix for suffix, _ in found.most_common(1))
    advice = f"Name its files, such as '{shown.rstrip('/')}/*{usual}'" if found else f"Data is {FORMATS}"
    raise DataError(f"{shown}: is a directory. {advice}")


def _read_suffix(path: Path) -> str:
    return path.suffix if path.suffix != ".gz" else "".join(path.suffixes[-2:])


def _open_file(place: Path, shown: str) -> Table:
    with place.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not is_gzip(head):
        return _open_plain_file(place, shown)
    name = place.name.removesuffix(".gz")
    if name == place.name or Path(name).suffix.lower() not in _TEXT_SUFFIXES:
        named = "" if Path(name).suffix == ".parquet" else f", or name it by its content, such as {_name_packed(name)}"
        raise DataError(f"{shown}: is compressed with gzip. Unpack it{named}")
    with unpack(place, shown) as path:
        return _open_plain_file(path, shown)


def _name_packed(name: str) -> str:
    return f"{name if Path(name).suffix.lower() in _TEXT_SUFFIXES else f'{name}.jsonl'}.gz"


def _open_plain_file(place: Path, shown: str) -> Table:
    with place.open("rb") as file:
        head = file.read(HEAD_BYTES)
        start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        while not start and (more := file.read(HEAD_BYTES)) and file.tell() < _MOST_BLANKS:
            start = more.lstrip()
    if head.startswith(b"PAR1"):
        if Path(shown).name != place.name:
            raise DataError(f"{shown}: is a Parquet file that is compressed with gzip. Unpack it")
        return ParquetTable(place, shown)
    foreign = next((what for magic, what in _HEADS.items() if head.startswith(magic)), None)
    if head[_TAR_PLACE:].startswith(b"ustar"):
        foreign = "is a tar archive. Unpack it"
    if head and (foreign := foreign or describe_stand_in(head)) is not None:
        raise DataError(f"{shown}: {foreign}. Data is {FORMATS}")
    suffix = Path(place.name.removesuffix(".gz")).suffix.lower()
    if suffix in (".csv", ".tsv") and not start.startswith(b"{"):
        return CsvTable(place, shown, delimiter="\t" if suffix == ".tsv" else None)
    if start.startswith(b"[") and (suffix == ".json" or start[1:].lstrip().startswith(b"{")):
        return JsonTable(place, shown)
    if suffix == ".json" and start.startswith(b"{") and not _first_line_is_whole(place):
        return JsonTable(place, shown)
    return JsonLinesTable(place, shown)


def _first_line_is_whole(place: Path) -> bool:
    """True for JSONL under the name `.json`: its first line is an object, and not one that wraps all rows."""
    import json

    with place.open("rb") as file:
        line = next((each for each in file if each.strip()), b"")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    wrapped = record.get("data") if isinstance(record, dict) and len(record) == 1 else None
    return not isinstance(wrapped, list)


def _is_hub_name(text: str) -> bool:
    """True for `OWNER/NAME`, with `:SPLIT` or not, where nothing lies at that path."""
    from hf_engine.model_directory import is_hub_name

    name = text.partition(":")[0]
    return "/" in name and Path(name).suffix not in _SUFFIXES and is_hub_name(name) and not os.path.exists(text)


_TEXT_SUFFIXES = frozenset({".csv", ".json", ".jsonl", ".ndjson", ".tsv"})
_SUFFIXES = _TEXT_SUFFIXES | frozenset({".arrow", ".bz2", ".gz", ".parquet", ".txt", ".xz", ".zip", ".zst"})
