"""Tables of every format: equal records, read by row, and one line for each file that cannot be read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from hf_algorithms.data import Row, _arrow_tables, load_rows, open_rows, read_records
from hf_algorithms.data._tables import open_table
from hf_protocols.errors import DataError

PACKED = gzip.compress(b'{"prompt": "a"}\n' * 9)
RECORDS = [
    {"prompt": 'two\nlines, "quoted"', "answer": "1.50", "level": "easy"},
    {"prompt": "\u00e9\u2028;", "answer": "b", "level": "hard"},
    {"prompt": "a\\", "answer": "[{", "level": "easy"},
] * 2
ROWS = [Row(each["prompt"], each["answer"], {"level": each["level"]}) for each in RECORDS]


def quote(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def write_csv(path: Path, comma: str = ",") -> None:
    lines = [comma.join(RECORDS[0]), *(comma.join(map(quote, each.values())) for each in RECORDS)]
    path.write_bytes(("\ufeff" + "\r\n".join(lines) + "\r\n\r\n").encode())


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=2)


def _pack_tar(name: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return packed.getvalue()


def write_packed(path: Path, name: str) -> None:
    """The file `name` in two members of gzip, as joined files are."""
    WRITERS[name][1](path)
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "rows.jsonl": (
        "JSONL",
        lambda path: path.write_text("".join(json.dumps(each) + "\n" for each in RECORDS) + "\n \n"),
    ),
    "lines.json": ("JSONL", lambda path: path.write_text("\n".join(map(json.dumps, RECORDS)))),
    "lines.csv": ("JSONL", lambda path: path.write_text("\n".join(map(json.dumps, RECORDS)))),
    "array.json": ("JSON", lambda path: path.write_text("\ufeff" + json.dumps(RECORDS))),
    "array.jsonl": ("JSON", lambda path: path.write_text(json.dumps(RECORDS, indent=1))),
    "wrapped.json": ("JSON", lambda path: path.write_text(json.dumps({"data": RECORDS}))),
    "indented.json": ("JSON", lambda path: path.write_text(json.dumps({"data": RECORDS}, indent=4))),
    "rows.csv": ("CSV", write_csv),
    "semicolons.csv": ("CSV", lambda path: write_csv(path, ";")),
    "rows.tsv": ("CSV", lambda path: write_csv(path, "\t")),
    "rows.parquet": ("Parquet", write_parquet),
    "parquet.jsonl": ("Parquet", write_parquet),
    "rows.jsonl.gz": ("JSONL", lambda path: write_packed(path, "rows.jsonl")),
    "lines.json.gz": ("JSONL", lambda path: write_packed(path, "lines.json")),
    "array.json.gz": ("JSON", lambda path: write_packed(path, "indented.json")),
    "rows.csv.gz": ("CSV", lambda path: write_packed(path, "rows.csv")),
    "rows.tsv.gz": ("CSV", lambda path: write_packed(path, "rows.tsv")),
    "plain.csv.gz": ("CSV", write_csv),
    "saved": ("datasets", lambda path: datasets.Dataset.from_list(RECORDS).save_to_disk(path)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_has_the_same_rows(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_arrow_tables, "_CACHE_BYTES", 0)
    kind, write = WRITERS[name]
    write(tmp_path / name)
    rows = open_rows([(str(tmp_path / name), None)])
    assert rows.files[0].table.format == kind
    assert list(rows) == ROWS
    assert [rows[number] for number in (4, 0, 3, -1)] == [ROWS[number] for number in (4, 0, 3, -1)]
    assert rows[1:5] == ROWS[1:5]
    assert [dict(record) for _, record in read_records(tmp_path / name)] == RECORDS
    assert list(rows.first(4)) == ROWS[:4]


def test_places_are_lines_or_rows(tmp_path: Path) -> None:
    for name, place in [
        ("rows.jsonl", "line 2"),
        ("array.json", "row 2"),
        ("rows.csv", "line 4"),
        ("rows.parquet", "row 2"),
    ]:
        WRITERS[name][1](tmp_path / name)
        assert open_table(tmp_path / name).where(1) == f"{tmp_path / name}, {place}"


@pytest.mark.parametrize("spelling", ["1.50", "-0", "-0.0", "1e5", "0.1E-3", "12345678901234567890", "3"])
def test_a_number_keeps_its_spelling(tmp_path: Path, spelling: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": {spelling}, "answer": {spelling}, "deep": {{"x": {spelling}}}}}')
    (row,) = load_rows(tmp_path / "a.jsonl")
    assert (row.prompt, row.answer) == (spelling, spelling)
    assert row.columns["deep"]["x"] == json.loads(spelling)
    assert json.loads(json.dumps(row.columns)) == {"deep": {"x": json.loads(spelling)}}


def test_what_is_wrong_in_columns_that_only_travel_is_left(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "score": NaN, "half": "\\ud83d"}')
    (row,) = load_rows(tmp_path / "a.jsonl")
    assert (row.answer, row.columns["score"] != row.columns["score"]) == (None, True)
    assert row.columns["half"] == "\ud83d"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"}\n', ", line 2 is empty: every line is one JSON object"),
        ("a.json", '[{"prompt": "a"}, {"prompt": "b"', ": the JSON array does not end"),
        ("a.json", '[{"prompt": "a"}, 3]', ": ', 3' stands after its last row, 1"),
        ("a.json", '[3, {"prompt": "a"}]', ", row 1: '3,' stands before it"),
        ("a.json", '[{"prompt": "a"} {"prompt": "b"}]', ", row 2: '' stands before it"),
        ("a.json", '[{"prompt": "a"}] x', ": 'x' stands after its last row"),
        ("a.json", '{\n"rows": 3}', ": is a JSON object, not a list of rows"),
        ("a.json", '[{"prompt": "a", "prompt": "b"}]', ", row 1: the key 'prompt' stands twice"),
        ("a.json", "[]", " has no rows"),
        ("a.csv", "", " has no rows"),
        ("a.csv", "prompt,answer\n", " has no rows"),
        ("a.csv", "prompt,prompt\na,b\n", ": its header has the column 'prompt' twice"),
        ("a.csv", "\na,b\n", ": its header is empty"),
        ("a.csv", 'prompt,answer\n"a\nb",c\nd\n', ", line 4 has 1 values, the header names 2 columns"),
        ("a.csv", 'prompt,answer\na,"b\n', ", line 2 is not CSV: unexpected end of data"),
        ("a.csv", "prompt\n\u00e9\n".encode("latin-1"), ", line 2 is not UTF-8: byte 1 of the line is 0xe9"),
        ("a.parquet", b"PAR1 and no more", ": cannot be read as Parquet"),
        ("a.jsonl", PACKED, ": is compressed with gzip. Unpack it, or name it by its content, such as a.jsonl.gz"),
        ("a.gz", PACKED, ": is compressed with gzip. Unpack it, or name it by its content, such as a.jsonl.gz"),
        ("a.parquet.gz", PACKED, ": is compressed with gzip. Unpack it"),
        ("a.jsonl.gz", gzip.compress(b"PAR1 and more"), ": is a Parquet file that is compressed with gzip. Unpack it"),
        ("a.jsonl.gz", PACKED[:-9], ": the gzip file is cut short. Fetch it again"),
        ("a.jsonl.gz", PACKED[:-8] + bytes(8), ": the gzip file is damaged: CRC check failed"),
        ("a.jsonl.gz", PACKED[:12] + b"\xff\xff" + PACKED[14:], ": the gzip file is damaged: "),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n{"prompt"'), ", line 2 is not JSON"),
        ("a.jsonl.gz", gzip.compress(b""), " has no rows"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfdab", ": is compressed with Zstandard. Unpack it"),
        ("a.jsonl", b"PK\x03\x04" + bytes(99), ": is a ZIP archive or a workbook. Unpack it, or save it as CSV"),
        ("a.jsonl", _pack_tar("a.jsonl"), ": is a tar archive. Unpack it"),
        ("a.jsonl.gz", gzip.compress(_pack_tar("a.jsonl")), ": is a tar archive. Unpack it"),
        ("a.jsonl", bz2.compress(b"{}"), ": is compressed with bzip2. Unpack it"),
        ("a.jsonl.xz", lzma.compress(b"{}"), ": is compressed with xz. Unpack it"),
        ("a.arrow", b"ARROW1\0\0", ": is an Arrow file. Save it as Parquet, or name the directory"),
        ("a.pkl", b"\x80\x04\x95", ": is a pickle of Python. Save it as JSONL or Parquet"),
        ("data_set/state.json", "{", ": `datasets` cannot load it"),
        (
            "data_set/dataset_dict.json",
            '{"splits": ["train", "test"]}',
            ": holds the splits train, test. Name one, such as",
        ),
        ("data_set/dataset_dict.json", "[" * 9000, ": its dataset_dict.json names no splits"),
        ("a.json", "[" * 9000, ""),
        ("data_set/part.parquet", b"", ": is a directory. Name its files, such as"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    given = path if path.parent == tmp_path else path.parent
    with pytest.raises(DataError) as caught:
        load_rows(given)
    assert str(caught.value).startswith(f"{given}{says}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            '{"prompt": ["a", "b"]}',
            "field 'prompt' is a JSON array, not text, a number or a list of messages with roles",
        ),
        (
            '{"prompt": {"a": 1}}',
            "field 'prompt' is a JSON object, not text, a number or a list of messages with roles",
        ),
        ('{"prompt": null}', "field 'prompt' has no value. Fill it in, or remove the row"),
        ('{"prompt": []}', "field 'prompt' is an empty list, which holds no message. Remove the row"),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"content": "b"}]}',
            "message 2 of field 'prompt' has no role. Add one, such as 'user'",
        ),
        ('{"prompt": "a", "answer": NaN}', "field 'answer' is NaN, not a finite number. Correct the row"),
    ],
)
def test_a_field_that_is_not_a_prompt_or_answer_is_one_line(tmp_path: Path, record: str, says: str) -> None:
    """The remedy is not a key that is set rightly."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' + record)
    with pytest.raises(DataError) as caught:
        load_rows(tmp_path / "a.jsonl")
    line = f"{tmp_path / 'a.jsonl'}, line 2: {says}"
    advice = ". Correct the row, or set data.prompt_field to another field"
    assert str(caught.value) in (line, line + advice)


def test_pairs_are_not_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"chosen": "a", "rejected": "b"}')
    with pytest.raises(
        DataError, match=r"line 1 has two responses and no prompt: such pairs train a policy or a reward model\. Use"
    ):
        load_rows(tmp_path / "a.jsonl")


def test_a_directory_of_files_names_most_of_them(tmp_path: Path) -> None:
    for name in ("a.csv", "b.jsonl.gz", "c.jsonl.gz", "notes.md"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"is a directory\. Name its files, such as '.*/\*\.jsonl\.gz'$"):
        load_rows(tmp_path)


def test_an_empty_value_of_csv_is_an_absent_answer(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\na,\nb,2\n")
    assert load_rows(tmp_path / "a.csv") == [Row("a"), Row("b", "2")]
    (tmp_path / "b.csv").write_text("prompt,answer\na,1\n,2\n")
    with pytest.raises(DataError, match=r"b\.csv, line 3: field 'prompt' has no value\. Fill it in, or remove"):
        load_rows(tmp_path / "b.csv")


def test_a_split_of_a_data_set_is_a_directory(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_list(RECORDS[:size]) for name, size in (("train", 4), ("test", 2))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    assert load_rows(tmp_path / "both" / "test") == ROWS[:2]


def test_parquet_numbers_keep_the_digits_they_were_written_with(tmp_path: Path) -> None:
    values = [0.1, 3.0, 123456.7, None]
    columns = {"prompt": pa.array([b"\xc3\xa9"] * 4), "answer": pa.array(values, pa.float32())}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = load_rows(tmp_path / "a.parquet")
    assert [row.answer for row in rows] == ["0.1", "3.0", "123456.7", None]
    assert rows[0].prompt == "\u00e9"
    pyarrow.parquet.write_table(pa.table({"prompt": ["a"], "answer": pa.array([b"\xff"])}), tmp_path / "b.parquet")
    with pytest.raises(
        DataError, match=r"b\.parquet, row 1: field 'answer' is binary and not UTF-8\. Store it as text"
    ):
        load_rows(tmp_path / "b.parquet")
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(twice, tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet: has the column 'prompt' twice\. Rename one of the two"):
        load_rows(tmp_path / "c.parquet")


def test_values_of_parquet_are_those_of_json(tmp_path: Path) -> None:
    from datetime import date
    from decimal import Decimal

    record = {
        "prompt": [{"role": "user", "content": "a", "name": None}],
        "answer": Decimal("1.50"),
        "more": {"day": date(2026, 1, 2), "raw": b"\x00", "n": 3, "list": [1.5, None]},
    }
    pyarrow.parquet.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    more = {"day": "2026-01-02", "raw": "AA==", "n": 3, "list": [1.5, None]}
    assert load_rows(tmp_path / "a.parquet") == [Row(({"role": "user", "content": "a"},), "1.50", {"more": more})]


def test_a_date_beyond_the_years_of_python_is_one_line(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"], "day": pa.array([10**9], pa.date32())})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    for name in ("rows.parquet", "saved"):
        opened = open_table(tmp_path / name)
        for read in (lambda opened=opened: list(opened.records()), lambda opened=opened: opened.record(0)):
            with pytest.raises(DataError, match=rf"{name}: a value cannot be read: .* Write its column as text"):
                read()


def test_a_hub_name_without_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    says = "^nobody/nothing-here:test: no such file or directory, and no dataset of the hub by that name can be fetched"
    with pytest.raises(DataError, match=says) as caught:
        load_rows("nobody/nothing-here:test")
    assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client would print each of its attempts."""
    for name in ("huggingface_hub.constants.ENDPOINT", "datasets.config.HF_ENDPOINT"):
        monkeypatch.setattr(name, "http://127.0.0.1:9")
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, False)
    with pytest.raises(DataError, match=r"^nobody/nothing-here: no such file or directory, and no dataset of the hub"):
        load_rows("nobody/nothing-here")
    assert not [each for each in caplog.records if "Retrying" in each.getMessage()]
    assert not datasets.config.HF_HUB_OFFLINE


def test_the_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    WRITERS["saved"][1](tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r"needs the package `datasets`. Install it: pip install 'hf-algorithms\[datasets\]'"
    ):
        load_rows(tmp_path / "saved")


def test_a_pattern_is_all_files_that_match(tmp_path: Path) -> None:
    for name, text in (("b.jsonl", "b"), ("a.csv", "a"), ("c.txt", "c")):
        (tmp_path / name).write_text(f"prompt\n{text}\n" if name != "b.jsonl" else '{"prompt": "b"}')
    rows = open_rows([(str(tmp_path / "*.*[lv]"), None)])
    assert [row.prompt for row in rows] == ["a", "b"]
    assert rows.where(1) == f"{tmp_path / 'b.jsonl'}, line 1"
    with pytest.raises(DataError, match="no file matches this pattern"):
        load_rows(tmp_path / "*.parquet")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "array.json"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name][1](path)
    table = open_table(path)
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match="the file was changed after it was opened"):
        table.record(0)
    table = open_table(path)
    (tmp_path / "new").write_text("{}")
    (tmp_path / "new").replace(path)
    assert dict(table.record(0)) == RECORDS[0], "the open file is the old one"


def test_a_packed_file_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    write_packed(tmp_path / "rows.jsonl.gz", "rows.jsonl")
    rows = open_rows([(str(tmp_path / "*.gz"), None)])
    (tmp_path / "rows.jsonl.gz").unlink()
    assert not any((tmp_path / "temporary").iterdir())
    assert list(rows) == ROWS
    assert rows.where(1) == f"{tmp_path / 'rows.jsonl.gz'}, line 2"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without space")
def test_no_space_to_unpack_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_packed(tmp_path / "rows.jsonl.gz", "rows.jsonl")
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode="r": opened(Path("/dev/full") if mode == "wb" else path, mode))
    with pytest.raises(DataError, match=r"gz: cannot be unpacked into .*: no space left on device\. Set TMPDIR to a"):
        open_table(tmp_path / "rows.jsonl.gz")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz"])
def test_a_file_is_never_in_memory_as_a_whole(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_arrow_tables, "_CACHE_BYTES", 1 << 20)
    text, num_rows = "x" * 2000, 4000
    lines = (json.dumps({"prompt": text, "n": number}) for number in range(num_rows))
    writers: dict[str, Callable[[Path], Any]] = {
        "a.jsonl": lambda path: path.write_text("\n".join(lines)),
        "a.json": lambda path: path.write_text(f"[{','.join(lines)}]"),
        "a.csv": lambda path: path.write_text("prompt,n\n" + "".join(f"{text},{n}\n" for n in range(num_rows))),
        "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress("\n".join(lines).encode())),
        "a.parquet": lambda path: pyarrow.parquet.write_table(
            pa.table({"prompt": [text] * num_rows, "n": range(num_rows)}), path, row_group_size=100
        ),
    }
    writers[name](tmp_path / name)
    tracemalloc.start()
    try:
        rows = open_rows([(str(tmp_path / name), None)])
        assert sum(len(str(row.prompt)) for row in rows) == 8_000_000
        assert int(rows[3999].columns["n"]) == 3999
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak + pa.total_allocated_bytes() < 6_000_000
