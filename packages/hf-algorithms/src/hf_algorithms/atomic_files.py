"""Files that are either complete or absent, even if something interrupts the writing."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_protocols import ConfigError

__all__ = [
    "describe_refusal",
    "find_part",
    "link_folder",
    "refuse_unwritable",
    "replace_folder",
    "sync",
    "sync_tree",
    "write_text",
    "writing_lines",
]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_text(path: str | Path, text: str) -> Path:
    """Writes `text` as UTF-8 to a file next to `path`, flushes it to the disk and renames it to `path` in one step.

    A reader sees the old file or the new one; a crash or a full disk leaves the old one as it was.

    Raises:
        OSError: when the folder cannot be made or written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _naming(path), part.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync(path.parent)
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
    with _naming(part), part.open("w", encoding="utf-8", newline="\n") as file:

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
        ConfigError: naming the part of the path that prevents this.
    """
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not place.is_dir():
        raise ConfigError(f"{label}: {place} is not a folder. Choose another path")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{label}: {place} cannot be written. Choose another path")


def describe_refusal(error: OSError) -> str:
    """Returns the reason of an error of the file system; of a folder's files, whose error lists all, that of one."""
    if error.strerror or not isinstance(error, shutil.Error):
        return error.strerror or str(error)
    _, _, reason = error.args[0][0]
    return str(reason).partition("] ")[2].partition(": ")[0] or str(reason)


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_tree(folder: Path) -> None:
    """Flushes all files of a folder to the disk, and then the folders with their names."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(place, name))
        sync(Path(place))


def link_folder(source: Path, target: Path) -> None:
    """Copies a folder; its weights, which nobody edits, take no space a second time where the file system has links.

    Raises:
        OSError: when the file system refuses.
    """
    shutil.copytree(source, target, copy_function=_link_weights)


def replace_folder(fresh: Path, folder: Path) -> None:
    """Puts a folder in the place of another one, which is removed.

    Linux exchanges both in one step, so that a reader always finds one of them. Where the system or the file system
    cannot, the name is absent between two renames.

    Raises:
        OSError: when the file system refuses; `folder` is then as it was.
    """
    if not folder.exists():
        fresh.replace(folder)
    elif _exchange(fresh, folder):
        shutil.rmtree(fresh, ignore_errors=True)
    else:
        earlier = fresh.with_name(f"{fresh.name}.earlier")
        shutil.rmtree(earlier, ignore_errors=True)
        folder.replace(earlier)
        try:
            fresh.replace(folder)
        except OSError:
            earlier.replace(folder)
            raise
        shutil.rmtree(earlier, ignore_errors=True)
    sync(folder.parent)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Has the error of a full disk name the file, which that of a write does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _link_weights(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copy2(source, target)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; False where that is not possible."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    if exchange is None:
        return False
    names = (os.fsencode(one), os.fsencode(other))
    return bool(exchange(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)
