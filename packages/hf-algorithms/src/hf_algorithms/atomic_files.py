"""Files that are either complete or absent, whatever interrupts the writing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_protocols import ConfigError

__all__ = ["find_part", "refuse_unwritable", "write_text", "writing_lines"]


def write_text(path: str | Path, text: str) -> Path:
    """Write ``text`` as UTF-8 beside ``path``, flush it to the disk and move it there in one step.

    A reader sees the old file or the new one; a crash or a full disk leaves the old one as it was.

    Raises:
        OSError: when the folder cannot be made or written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def find_part(path: str | Path) -> Path:
    """Returns where `writing_lines` keeps lines until all are there."""
    path = Path(path)
    return path.with_name(f"{path.name}.part")


@contextmanager
def writing_lines(path: str | Path) -> Iterator[Callable[[Iterable[str]], None]]:
    """Yields a function that appends lines and flushes them to the disk.

    Lines stand in `PATH.part` until the block ends without an error; then the file takes its name. An interruption
    leaves the part with every line that was written.

    Raises:
        OSError: when the folder cannot be made or written.
    """
    path, part = Path(path), find_part(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with part.open("w", encoding="utf-8", newline="\n") as file:

        def write(lines: Iterable[str]) -> None:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

        yield write
    part.replace(path)


def refuse_unwritable(folder: Path, label: str) -> None:
    """Refuses a folder in which nothing can be written or that cannot be made; makes nothing.

    Args:
        folder: it may be absent.
        label: beginning of the message.

    Raises:
        ConfigError: naming the first folder on the way that is in the way.
    """
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not place.is_dir():
        raise ConfigError(f"{label}: {place} is not a folder. Choose another path")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{label}: {place} cannot be written. Choose another path")
