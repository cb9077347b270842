"""Files that others wrote, and what may lie in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_protocols import ConfigError, ModelShape
from hf_protocols.outer_files import check_is_itself, describe_stand_in, read_json_object

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"


def test_json_object_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text('{"a": [1, NaN]}')
    assert read_json_object(ConfigError, file)["a"][0] == 1
    link = tmp_path / "link.json"
    link.symlink_to(file)
    assert read_json_object(ConfigError, link).keys() == {"a"}


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (b"", "is empty"),
        (POINTER, "is a Git LFS pointer, not the file itself. Run `git lfs pull`"),
        (b"\n" + POINTER, "is a Git LFS pointer"),
        (b"<!DOCTYPE HTML><p>", "is a web page"),
        (b"  <html>", "is a web page"),
        (bytes(20), "begins with zeros only"),
        (b"\x1f\x8b\x08", "is compressed with gzip"),
        (b"PAR1\x15", "is a Parquet file"),
        (b'{"a": 1}', None),
        (b"<eos>", None),
    ],
)
def test_stand_in_is_known_by_its_first_bytes(head: bytes, told: str | None) -> None:
    found = describe_stand_in(head)
    assert found is None if told is None else told in str(found)


def test_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/config\.json cannot be read: it is a device or a pipe"):
        ModelShape.from_config(tmp_path)
    with pytest.raises(ConfigError, match=r"^it cannot be read: it is a device or a pipe$"):
        check_is_itself(ConfigError, tmp_path / "config.json", name="it")


def test_pointer_in_the_place_of_a_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(POINTER)
    with pytest.raises(
        ConfigError, match=r"config\.json is a Git LFS pointer, not the file itself\. Run `git lfs pull`"
    ):
        ModelShape.from_config(tmp_path)
