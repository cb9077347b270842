"""Files of a state: written whole and fsynced, with the digest of what is on disk, and verified against a list."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hf_engine.agreement import together
from hf_engine.training.directories import agree_on_directory, check_directory
from hf_engine.training.state.records import StateFile
from hf_protocols.errors import BackendError, StateError
from hf_protocols.validation import show

if TYPE_CHECKING:
    import torch

__all__ = [
    "StateFile",
    "agree_on_path",
    "agreed",
    "check_files",
    "list_written",
    "listing_name",
    "mark_failure",
    "remove_marks",
    "sync_directory",
    "verify_files",
    "write_json",
    "write_listing",
    "write_tensors",
]

_CHUNK_BYTES = 1 << 24
_FAILED = ".failed"


@contextmanager
def agreed(outcome: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """`together` with errors of states.

    Raises:
        StateError: on every rank, if the block failed on any.
    """
    with _as_state_errors(), together(outcome, group, error=StateError):
        yield


def agree_on_path(directory: str | Path, outcome: str, group: dist.ProcessGroup) -> Path:
    """The absolute path of a directory that all ranks were given. Collective.

    Raises:
        StateError: on every rank, if any was given another one, or no path.
    """
    with agreed(outcome, group):
        check_directory(directory)
        path = Path(directory).resolve()
    with _as_state_errors():
        agree_on_directory(path, group)
    return path


@contextmanager
def _as_state_errors() -> Iterator[None]:
    try:
        yield
    except StateError:
        raise
    except BackendError as error:
        raise StateError(str(error)) from error.__cause__


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> StateFile:
    """Writes contiguous host tensors as a safetensors file that is on disk when this returns.

    Raises:
        StateError: naming the file, if the file system refuses.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with _named(path):
        try:
            save_file(dict(tensors), path, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, among others
            raise OSError(str(error)) from error
        return _settle(path)


def write_json(path: Path, body: Mapping[str, Any]) -> StateFile:
    """Writes a JSON object that is on disk when this returns.

    Raises:
        StateError: naming the file, if the file system refuses.
    """
    with _named(path):
        path.write_text(json.dumps(body, allow_nan=False) + "\n", encoding="utf-8")
        return _settle(path)


def listing_name(rank: int) -> str:
    """Name of the file in which a rank lists what it wrote."""
    return f"files-{rank:05d}.json"


def write_listing(directory: Path, rank: int, files: Sequence[StateFile]) -> None:
    """Lists a rank's files, all of which are on disk; the list itself appears in one step.

    Raises:
        StateError: naming the list, if the file system refuses.
    """
    path = directory / listing_name(rank)
    part = path.with_suffix(".part")
    with _named(path), ExitStack() as undo:
        undo.callback(part.unlink, missing_ok=True)
        part.write_text(json.dumps({"files": [asdict(each) for each in files]}) + "\n", encoding="utf-8")
        part.replace(path)


def list_written(directory: str | Path, world_size: int) -> tuple[StateFile, ...] | None:
    """Returns the files of a state that `save_state` writes in the background, once all of them are on disk; else None.

    Args:
        directory: that `save_state` was given.
        world_size: number of ranks that save together.

    Raises:
        StateError: naming a list that cannot be read, or a rank that could not write; `finish_state` says why.
    """
    found: list[StateFile] = []
    paths = [Path(directory) / listing_name(rank) for rank in range(world_size)]
    for rank, path in enumerate(paths):
        if path.with_suffix(_FAILED).exists():
            raise StateError(f"{directory}: rank {rank} could not write its files. Call finish_state() for the reason")
    for path in paths:
        try:
            found += [StateFile(**each) for each in json.loads(path.read_text(encoding="utf-8"))["files"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise StateError(f"{path} cannot be read: {error}. Save the state again") from error
    return tuple(found)


def mark_failure(directory: Path, rank: int) -> None:
    """Says in a state's directory that a rank could not write; an empty file fits on most full disks."""
    with suppress(OSError):
        (directory / listing_name(rank)).with_suffix(_FAILED).touch()


def remove_marks(directory: Path) -> None:
    """Removes what `mark_failure` left of an earlier save.

    Raises:
        OSError: if the file system refuses.
    """
    for mark in directory.glob(f"*{_FAILED}"):
        mark.unlink()


def sync_directory(directory: Path) -> None:
    """Has the names of a directory's files on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_files(files: object) -> tuple[StateFile, ...] | None:
    """The list of a state's files, or None for none.

    Raises:
        StateError: for something else, two entries of one file, or a list without `state.json`.
    """
    if files is None:
        return None
    if not isinstance(files, Sequence) or not all(isinstance(each, StateFile) for each in files):
        raise StateError(f"files={show(files)}. Use what finish_state() of all ranks returned, a list of StateFile")
    paths = [each.path for each in files]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise StateError(f"files: {show(twice[0])} is listed twice. Give the files of one state")
    return tuple(files)


def verify_files(directory: Path, files: Sequence[StateFile]) -> None:
    """Reads files and compares them with their digests.

    Raises:
        StateError: naming a file that is missing, has another size, or other bytes.
    """
    for each in files:
        path = directory / each.path
        if not path.is_file():
            raise StateError(f"{path} does not exist: the state is incomplete. Load another one")
        size = path.stat().st_size
        if size != each.bytes:
            raise StateError(f"{path} has {size} bytes, {each.bytes} were written: it is damaged. Load another state")
        with _named(path, "read"):
            found = _digest(path)
        if found != each.sha256:
            raise StateError(
                f"{path} is damaged: its SHA-256 is {found[:12]}..., {each.sha256[:12]}... was written. "
                "Load another state"
            )


def _settle(path: Path) -> StateFile:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return StateFile(path=path.name, bytes=path.stat().st_size, sha256=_digest(path))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _named(path: Path, action: str = "written") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(f"{path} cannot be {action}: {error.strerror or error}") from error
