"""Files that others wrote: JSON objects, read with one error, and what may lie in the place of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_protocols._json import parse_json
from hf_protocols.errors import HybridFlowError

__all__ = ["HEAD_BYTES", "describe_stand_in", "read_json_object"]

HEAD_BYTES = 512
"""As many bytes of a file as `describe_stand_in` wants to see."""

_LFS_POINTERS = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")
_PAGES = (b"<!doctype html", b"<html", b"<head", b"<?xml")
_OTHERS = {
    b"PK\x03\x04": "is a ZIP archive, such as torch.save writes",
    b"\x80\x02": "is a pickle of Python, such as torch.save writes",
    b"\x1f\x8b": "is compressed with gzip. Unpack it",
    b"GGUF": "is a GGUF file, the format of llama.cpp",
}


def describe_stand_in(head: bytes) -> str | None:
    """What a file is instead of itself, with the remedy; None where its first bytes do not say.

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


def read_json_object(error: type[HybridFlowError], file: Path, *, name: str | None = None) -> dict[str, Any]:
    """The JSON object that a UTF-8 file holds.

    Args:
        error: what is raised.
        file: to read.
        name: of the file in messages; its path by default.

    Raises:
        error: if the file is absent, no regular file, a stand-in for the file itself, or holds something else.
    """
    shown = name or str(file)
    try:
        if not file.exists() and not file.is_symlink():
            raise error(f"{shown} does not exist")
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise error(f"{shown} cannot be read: it is a {'directory' if file.is_dir() else 'device or a pipe'}")
        text = file.read_bytes()
    except FileNotFoundError:
        raise error(f"{shown} cannot be read: it is a link to a file that does not exist. Fetch it again") from None
    except (OSError, ValueError) as reason:  # a ValueError for a path that holds a NUL
        why = reason.strerror if isinstance(reason, OSError) else reason
        raise error(f"{shown[:300]} cannot be read: {why}") from None
    if (stand_in := describe_stand_in(text[:HEAD_BYTES])) is not None:
        raise error(f"{shown} {stand_in}")
    wrong = f"{shown} is no JSON"
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise error(f"{wrong}: it is not UTF-8 ({reason.reason} at byte {reason.start}). Save it as UTF-8") from None
    body = parse_json(error, wrong, decoded)
    if not isinstance(body, dict):
        raise error(f"{shown} holds no JSON object, but {_KINDS.get(type(body), 'a number')}")
    return body


_KINDS: dict[type, str] = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
