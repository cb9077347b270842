from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_protocols.errors import ConfigError
from hf_protocols.paths import expand_path, explain_variables, read_path, read_text


def test_the_home_directory_stands_for_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/ada")
    for given, path in (("~", "/ada"), ("~/a b", "/ada/a b"), ("./~/x", "./~/x"), ("/a/~", "/a/~")):
        assert expand_path(given) == path
    assert expand_path("~root/x").endswith("root/x")


@pytest.mark.parametrize("text", ["", " ", "\ta", "a\u00a0", "a\0", "~no-such-user", "a" * 256, "a/" * 2048, "\ud800"])
def test_a_text_that_is_not_a_path_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--output = .{2,80}: [^\n]*$"):
        read_path("--output", text)


def test_a_path_as_long_as_the_system_allows_is_kept() -> None:
    assert expand_path("a/" * 2047 + "b") == "a/" * 2047 + "b"
    assert expand_path("a" * 255) == "a" * 255


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "cannot be read: No such file or directory. Give the path of a plan"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory. Give the path of a plan"),
        (os.mkfifo, "is not a regular file. Give the path of a plan"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file. Give the path of a plan"),
        (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1"), "is a Git LFS pointer, not the"),
        (lambda path: path.write_bytes(b"\x1f\x8b\x08"), "is compressed with gzip. Unpack it"),
        (lambda path: path.write_bytes(b"ab\xff"), "is not UTF-8 text: byte 3 is 0xff. Save a plan as UTF-8"),
        (lambda path: path.write_text("x", "utf-16"), "is not UTF-8 text: it looks like UTF-16"),
    ],
    ids=["absent", "directory", "pipe", "device", "pointer", "gzip", "latin-1", "utf-16"],
)
def test_a_file_that_is_not_text_is_named(tmp_path: Path, make: object, reason: str) -> None:
    make(tmp_path / "x")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=f"^the plan {tmp_path / 'x'} {reason}"):
        read_text(tmp_path / "x", "the plan", "a plan")


def test_variables_in_an_absent_path_are_explained(tmp_path: Path) -> None:
    """A file that is there may have such a name."""
    path = tmp_path / "$HOME"
    says = r"Give the path of a plan\. Variables such as \$HOME are not replaced in a path, but a leading ~ is$"
    with pytest.raises(ConfigError, match=says):
        read_text(path, "the plan", "a plan")
    path.write_text("{}")
    assert read_text(path, "the plan", "a plan") == "{}"


@pytest.mark.parametrize(
    ("path", "named"),
    [("$HOME/x", "$HOME"), ("/data/${SPLIT}.jsonl", "${SPLIT}"), ("a$", ""), ("a/$/b", ""), ("~/x", "")],
)
def test_only_names_of_variables_are_explained(path: str, named: str) -> None:
    found = explain_variables(path)
    assert found.startswith(f". Variables such as {named} are") if named else found == ""
