"""Paths as users write them: `~` is expanded, and an unusable path is refused before anything is made.

Nothing here opens a path: `read_text` reads files, and each caller reads its own folders.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hf_protocols.errors import ConfigError
from hf_protocols.outer_files import HEAD_BYTES, describe_stand_in
from hf_protocols.validation import show

__all__ = ["expand_path", "explain_variables", "read_path", "read_text"]

_MOST_BYTES = 4095
_MOST_NAME_BYTES = 255
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def expand_path(text: str) -> str:
    """Returns the path with a leading `~` or `~user` replaced by that home directory.

    Raises:
        ConfigError: for a text that is empty, begins or ends with a blank, holds a NUL character or half a surrogate
            pair, is longer than a path may be, or names a user without a home directory. The message does not name
            the key or argument that holds the path.
    """
    if not text.strip():
        raise ConfigError("a path cannot be empty or blank. Give a path")
    if text != text.strip():
        where = "begins" if text != text.lstrip() else "ends"
        raise ConfigError(f"the path {where} with a blank, which would be part of the name. Remove it")
    if "\0" in text:
        raise ConfigError("the path contains a NUL character. Remove it")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        user = text[1:].partition("/")[0]
        unknown = f"there is no user {show(user)}" if user else "the home directory is not known"
        raise ConfigError(f"`~` cannot be expanded: {unknown}. Write the folder out, or ./~ for that name")
    try:
        names = [len(os.fsencode(part)) for part in path.split("/")]
    except UnicodeEncodeError:
        raise ConfigError("the path contains an unpaired surrogate, which is not a character. Remove it") from None
    size, longest = sum(names) + len(names) - 1, max(names)
    if size > _MOST_BYTES or longest > _MOST_NAME_BYTES:
        limits = f"{_MOST_BYTES} bytes, or {_MOST_NAME_BYTES} for one name"
        raise ConfigError(f"a path of {size} bytes with a name of {longest} is longer than {limits}. Shorten it")
    return path


def explain_variables(path: str | Path) -> str:
    """Returns a sentence, after a full stop, that ends a message about an absent path which has a variable's name.

    It is empty for any other path.
    """
    found = _VARIABLE.search(str(path))
    return f". Variables such as {found[0]} are not replaced in a path, but a leading ~ is" if found else ""


def read_path(name: str, text: str) -> str:
    """Returns the expanded path that the key or argument `name` holds.

    Raises:
        ConfigError: as `expand_path`; the message has `name` and the path.
    """
    try:
        return expand_path(text)
    except ConfigError as error:
        raise ConfigError(f"{name} = {show(text)}: {error}") from None


def read_text(path: Path, what: str, wanted: str) -> str:
    """Returns the text of a UTF-8 file, without a byte order mark.

    Args:
        path: of the file.
        what: stands before the path in a message, such as `"the configuration"`.
        wanted: what the file should be, such as `"a TOML file"`.

    Raises:
        ConfigError: for a path that is absent, not a regular file or unreadable, for another encoding, and for a file
            that stands in for another, such as a Git LFS pointer.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for
            raise ConfigError(f"{what} {path} is not a regular file. Give the path of {wanted}")
        body = path.read_bytes()
    except OSError as error:
        hint = explain_variables(path)
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}. Give the path of {wanted}{hint}") from None
    if body and (stand_in := describe_stand_in(body[:HEAD_BYTES])) is not None:
        raise ConfigError(f"{what} {path} {stand_in}")
    try:
        return body.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        is_utf_16 = body.startswith(_UTF_16)
        kind = "it looks like UTF-16" if is_utf_16 else f"byte {error.start + 1} is {body[error.start]:#04x}"
        raise ConfigError(f"{what} {path} is not UTF-8 text: {kind}. Save {wanted} as UTF-8") from None
