"""Files from outside: JSON objects read with one error, and files that stand in for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_protocols._json import parse_json
from hf_protocols.errors import HybridFlowError
from hf_protocols.validation import shorten

__all__ = ["HEAD_BYTES", "check_is_itself", "describe_stand_in", "read_json_object"]

HEAD_BYTES = 512
"""Number of bytes from the start of a file that `describe_stand_in` needs."""

_LFS_POINTERS = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")
_PAGES = (b"<!doctype html", b"<html", b"<head", b"<?xml")
_OTHERS = {
    b"PK\x03\x04": "is a ZIP archive, such as torch.save writes",
    b"\x80\x02": "is a pickle of Python, such as torch.save writes",
    b"\x1f\x8b": "is compressed with gzip. Unpack it",
    b"PAR1": "is a Parquet file, a table in binary form",
    b"GGUF": "is a GGUF file, the format of llama.cpp",
}


def describe_stand_in(head: bytes) -> str | None:
    """Recognises a file that stands in for another, with the remedy; None if its first bytes do not say.

    Args:
        head: the file's first `HEAD_BYTES` bytes, or all of fewer.
    """
    if not head:
        return "is empty. Fetch it again"
    start = head.lstrip()
    if start.startswith(_LFS_POINTERS):
        return "is a Git LFS pointer, not the file itself. Run `git lfs pull` in its repository"
    if start[:64].lower().startswith(_PAGES):
        return "is a web page, not the file itself. Fetch the file by its download link"
    if not any(head):
        return "begins with zeros only: the download did not finish. Fetch it again"
    return next((what for magic, what in _OTHERS.items() if head.startswith(magic)), None)


def check_is_itself(error: type[HybridFlowError], file: Path, *, name: str | None = None) -> None:
    """Refuses a file that is absent, not a regular file, or a stand-in, by its first bytes.

    Args:
        error: what is raised.
        file: to look at.
        name: of the file in messages; its path by default.

    Raises:
        error: naming what lies there instead.
    """
    _read(error, file, name or str(file), HEAD_BYTES)


def read_json_object(error: type[HybridFlowError], file: Path, *, name: str | None = None) -> dict[str, Any]:
    """Returns the JSON object in a UTF-8 file.

    Args:
        error: what is raised.
        file: to read.
        name: of the file in messages; its path by default.

    Raises:
        error: if the file is absent, not a regular file, a stand-in, or holds something else.
    """
    shown = name or str(file)
    text = _read(error, file, shown)
    wrong = f"{shown} is not valid JSON"
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise error(f"{wrong}: it is not UTF-8 ({reason.reason} at byte {reason.start}). Save it as UTF-8") from None
    body = parse_json(error, wrong, decoded)
    if not isinstance(body, dict):
        raise error(f"{shown} is not a JSON object but {_KINDS.get(type(body), 'a number')}")
    return body


def _read(error: type[HybridFlowError], file: Path, shown: str, most: int = -1) -> bytes:
    try:
        if "\0" in str(file):
            raise ValueError("its name holds a NUL")
        is_there = file.exists()
        if is_there and file.is_file():
            with file.open("rb") as opened:
                content = opened.read(most)
        else:  # a pipe would be waited for
            content = None
            is_link, is_directory = file.is_symlink(), file.is_dir()
    except (OSError, ValueError) as reason:
        why = reason.strerror if isinstance(reason, OSError) else reason
        raise error(f"{shorten(shown)} cannot be read: {why}") from None
    if content is None:
        if is_there:
            raise error(f"{shown} cannot be read: it is a {'directory' if is_directory else 'device or a pipe'}")
        if is_link:
            raise error(f"{shown} cannot be read: it is a link to a file that does not exist. Fetch it again")
        raise error(f"{shown} does not exist")
    if (stand_in := describe_stand_in(content[:HEAD_BYTES])) is not None:
        raise error(f"{shown} {stand_in}")
    return content


_KINDS: dict[type, str] = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
