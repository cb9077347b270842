"""Tables in Arrow's columns: Parquet files, and data sets of the `datasets` library, from a directory or the hub.

Only this module imports pyarrow and `datasets`.
"""

from __future__ import annotations

import base64
import json
import struct
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from hf_protocols.errors import DataError
from hf_protocols.foreign_code import Caught, raised_as
from hf_protocols.validation import show

__all__ = ["Binary", "DatasetTable", "ParquetTable", "open_dataset_directory", "open_hub_dataset"]

_CACHE_BYTES = 256 << 20
_BATCH_ROWS = 1024
_PROBE_S = 10.0
_PLAIN = (str, int, float, type(None))


class Binary(str):
    """Bytes in base64, as rewards see them; a prompt or an answer is the text that they are in UTF-8."""

    __slots__ = ()

    def decode(self) -> str:
        """Returns the text.

        Raises:
            UnicodeDecodeError: for bytes that are not UTF-8.
        """
        return base64.b64decode(self).decode()


class ParquetTable:
    """A Parquet file, read by its row groups; the last ones read stay in memory up to 256 MiB."""

    format = "Parquet"

    def __init__(self, path: Path, shown: str) -> None:
        self._shown = shown
        with self._errors():
            import pyarrow.parquet

            self._file = pyarrow.parquet.ParquetFile(path)
            groups = self._file.metadata
            sizes = [groups.row_group(group).num_rows for group in range(groups.num_row_groups)]
        self._narrow = _find_narrow(self._file.schema_arrow, shown)
        self._starts: list[int] = list(accumulate(sizes, initial=0))
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def where(self, row: int) -> str:
        return f"{self._shown}, row {row + 1}"

    def record(self, row: int) -> Mapping[str, Any]:
        group = bisect_right(self._starts, row) - 1
        with self._errors():
            part = self._read_group(group).slice(row - self._starts[group], 1)
        (found,) = _list_records(part, self._shown)
        return _to_json_object(found, self._narrow)

    def records(self) -> Iterator[Mapping[str, Any]]:
        batches = self._file.iter_batches(batch_size=_BATCH_ROWS)
        while True:
            with self._errors():
                batch = next(batches, None)
            if batch is None:
                return
            yield from (_to_json_object(each, self._narrow) for each in _list_records(batch, self._shown))

    def _read_group(self, group: int) -> Any:
        if group not in self._groups:
            self._groups[group] = self._file.read_row_group(group)
            while len(self._groups) > 1 and sum(each.nbytes for each in self._groups.values()) > _CACHE_BYTES:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        return self._groups[group]

    def _errors(self) -> AbstractContextManager[None]:
        """Turns what Arrow raises of a damaged file, OSError, ArrowException or KeyError, into one line."""
        shown = self._shown
        return raised_as(
            lambda error: DataError(
                f"{shown}: cannot be read as Parquet: {show(' '.join(str(error).split()))}. Fetch it again"
            )
        )


class DatasetTable:
    """A data set of the `datasets` library, mapped into memory from its files."""

    format = "datasets"

    def __init__(self, dataset: Any, shown: str) -> None:
        self._dataset = dataset.with_format("arrow")
        self._shown = shown
        self._narrow = _find_narrow(dataset.features.arrow_schema, shown)

    def __len__(self) -> int:
        return len(self._dataset)

    def where(self, row: int) -> str:
        return f"{self._shown}, row {row + 1}"

    def record(self, row: int) -> Mapping[str, Any]:
        (found,) = _list_records(self._dataset[row], self._shown)
        return _to_json_object(found, self._narrow)

    def records(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._dataset.iter(_BATCH_ROWS):
            yield from (_to_json_object(each, self._narrow) for each in _list_records(batch, self._shown))


def open_dataset_directory(path: Path, shown: str) -> DatasetTable:
    """Opens a directory that `save_to_disk` wrote.

    Raises:
        DataError: for one with several splits, one that is damaged, and without the library.
    """
    if (path / "dataset_dict.json").is_file():
        splits = _read_splits(path / "dataset_dict.json", shown)
        if len(splits) > 1:
            raise DataError(
                f"{shown}: holds the splits {', '.join(splits)}. Name one, such as '{shown.rstrip('/')}/{splits[0]}'"
            )
        path = path / splits[0]
    datasets = _import_datasets(shown)
    with raised_as(lambda error: DataError(f"{shown}: `datasets` cannot load it: {_one_line(error)}. Save it again")):
        return DatasetTable(datasets.load_from_disk(str(path)), shown)


def open_hub_dataset(name: str) -> DatasetTable:
    """Opens `OWNER/NAME` or `OWNER/NAME:SPLIT` of the hub, or of what its client fetched earlier; the split is `train`.

    Raises:
        DataError: if the data set does not exist, the hub cannot be reached, or the library is not installed.
    """
    datasets = _import_datasets(name)
    path, _, split = name.partition(":")
    with raised_as(partial(_describe_absent, name)), nullcontext() if _reaches_hub(path) else _working_offline():
        return DatasetTable(datasets.load_dataset(path, split=split or "train", trust_remote_code=False), name)


def _describe_absent(name: str, error: BaseException) -> DataError:
    if not isinstance(error, OSError):  # of a parser or builder
        return DataError(f"{name}: `datasets` cannot load it: {_one_line(error)}")
    # DatasetNotFoundError as well: no such name, or no network to look for it
    return DataError(
        f"{name}: no such file or directory, and no dataset of the hub by that name can be fetched: "
        f"{_one_line(error)}. Correct the path, or fetch the dataset where there is a network"
    )


def _reaches_hub(path: str) -> bool:
    """False if nothing at all answers: the client then tries for half a minute and prints each of its attempts."""
    from huggingface_hub import HfApi

    with Caught() as caught:  # the client raises errors of its own, of httpx and of the system
        HfApi().dataset_info(path, timeout=_PROBE_S)
    return caught.error is None or getattr(caught.error, "response", None) is not None


@contextmanager
def _working_offline() -> Iterator[None]:
    """The libraries read what they fetched earlier, as with HF_HUB_OFFLINE=1."""
    import datasets
    import huggingface_hub

    places: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [each.HF_HUB_OFFLINE for each in places]
    try:
        for each in places:
            each.HF_HUB_OFFLINE = True
        yield
    finally:
        for each, value in zip(places, before, strict=True):
            each.HF_HUB_OFFLINE = value


def _import_datasets(shown: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{shown}: reading it needs the package `datasets`. Install it: pip install 'hf-algorithms[datasets]'"
        ) from None
    datasets.disable_progress_bars()
    return datasets


def _read_splits(file: Path, shown: str) -> list[str]:
    try:
        splits = json.loads(file.read_bytes())["splits"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{shown}: its dataset_dict.json names no splits. Save it again") from error
    return [str(each) for each in splits]


def _one_line(error: BaseException) -> str:
    return show(" ".join(str(error).split()).rstrip(".") or type(error).__name__)


def _find_narrow(schema: Any, shown: str) -> Mapping[str, str]:
    """Columns of floats with fewer digits than Python's, by their format in `struct`; refuses a name that is twice."""
    from pyarrow import types

    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise DataError(f"{shown}: has the column {show(twice[0])} twice. Rename one of the two")
    kinds = ((types.is_float32, "f"), (types.is_float16, "e"))
    return {field.name: kind for field in schema for is_kind, kind in kinds if is_kind(field.type)}


def _list_records(part: Any, shown: str) -> list[Any]:
    """The rows of a table of Arrow; refuses values that Python cannot hold, such as dates beyond its years."""
    with raised_as(
        lambda error: DataError(
            f"{shown}: a value cannot be read: {_one_line(error)}. Write its column as text, or leave the column out"
        )
    ):
        records: list[Any] = part.to_pylist()
        return records


def _to_json_object(record: Mapping[str, Any], narrow: Mapping[str, str]) -> Mapping[str, Any]:
    """The record as JSON has it; a float of 32 or 16 bits has the digits that it was written with, as 0.1."""
    found = {name: _to_json(value) for name, value in record.items()}
    for name, kind in narrow.items():
        if found[name] is not None:
            found[name] = _shorten(found[name], kind)
    return found


def _shorten(value: float, kind: str) -> float:
    """The number with the fewest digits that is stored as this one."""
    for digits in range(1, 10):
        shorter = float(f"{value:.{digits}g}")
        if struct.unpack(kind, struct.pack(kind, shorter))[0] == value:
            return shorter
    return value


def _to_json(value: Any) -> Any:
    """The value as JSON has it: bytes in base64; decimals, dates and times as text."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(name): _to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    return Binary(base64.b64encode(value).decode()) if isinstance(value, bytes) else str(value)
