from __future__ import annotations

import tomllib
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_protocols.errors import ConfigError
from hf_protocols.toml import find_unwritable, format_toml_value, parse_toml, read_toml


def _is_plain(when: datetime) -> bool:
    """False in the hour that a zone repeats or skips: such a time equals none of another zone."""
    offset = when.utcoffset()
    return offset is not None and when == when.replace(tzinfo=timezone(offset))


# Surrogates too, which are refused.
texts = st.text(st.characters() | st.sampled_from('"\\\x7f\x00\n\r\ud800.'))
zones = st.timezones() | st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
leaves = (
    st.booleans()
    | st.integers()
    | st.floats()
    | texts
    | st.dates()
    | st.times()
    | st.datetimes(timezones=st.none() | zones).filter(lambda when: when.tzinfo is None or _is_plain(when))
)
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=12)


@settings(max_examples=300, derandomize=True)
@given(tables=st.dictionaries(texts, values, max_size=5))
def test_what_is_writable_reads_back_as_it_is(tables: dict[str, Any]) -> None:
    if find_unwritable(tables) is None:
        again = tomllib.loads(f"value = {format_toml_value(tables)}")["value"]
        assert again == tables
        assert _kinds(again) == _kinds(tables)


def _kinds(value: Any) -> Any:
    """Types and numbers: 1, 1.0 and True are equal, and so are 0.0 and -0.0."""
    if isinstance(value, dict):
        return {key: _kinds(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_kinds(each) for each in value]
    return type(value), repr(value) if isinstance(value, float) else None


@pytest.mark.parametrize(
    "value",
    [datetime(2026, 1, 1, tzinfo=UTC), datetime(1, 1, 1), -0.0, 10**3999, "\U0001f600", {"a b": [[[]], {}]}, True],
)
def test_an_ordinary_value_is_writable(value: Any) -> None:
    assert find_unwritable({"key": value}) is None
    assert tomllib.loads(f"key = {format_toml_value(value)}") == {"key": value}


@pytest.mark.parametrize(
    ("tables", "where"),
    [
        ({"a": {"b": [0, float("nan")]}}, "a.b[1]"),
        ({"a": 1, "b": None}, "b"),
        ({"a": {"b": "x\udc80"}}, "a.b"),
        ({"a": {"b": {2: 3}}}, "a.b"),
        ({"a": 10**4001}, "a"),
        ({"a": datetime(2026, 1, 1, tzinfo=timezone(timedelta(seconds=30)))}, "a"),
        ({"a": Path("x")}, "a"),
    ],
)
def test_the_first_unwritable_value_is_found(tables: dict[str, Any], where: str) -> None:
    found = find_unwritable(tables)
    assert found is not None
    assert found[0] == where


def test_a_circle_of_tables_ends() -> None:
    circle: dict[str, Any] = {}
    circle["a"] = [circle]
    found = find_unwritable(circle)
    assert found is not None
    assert "nest deeper than 32 levels" in found[2]


def test_what_no_reader_can_hold_is_one_line() -> None:
    for text in ("a = " + "[" * 5000, "a = " + "{b=" * 5000, "a = " + "9" * 5000):
        with pytest.raises(ConfigError, match=r"^here is not usable TOML: [^\n]*$"):
            parse_toml(text, "here")


def test_a_toml_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbfa = 1\r\nb = 2\r\n")
    assert read_toml(path) == {"a": 1, "b": 2}
