"""Configuration and inputs of a run, so that `--resume` needs its directory alone."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_algorithms.checkpoints.commit import CheckpointError, digest_file
from hf_algorithms.run_directory import ORIGIN

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.run_directory import RunDirectory

__all__ = ["InputFile", "RunOrigin", "describe_origin", "move_paths", "read_origin", "write_origin"]

_PATH_KEYS = frozenset({"path", "tokenizer", "train", "validation", "test", "pretraining", "data", "chat_template"})
_MADE_TOKENIZERS = frozenset({"characters", "bpe"})
_SAMPLE_BYTES = 1 << 20
_LARGE_BYTES = 64 << 20
"""From this size on a file is identified by its size, first and last MiB: weights are too large to read at each
start."""


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file that the run reads: its absolute path, its size and a digest."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class RunOrigin:
    """Configuration and inputs with which a run was started.

    Attributes:
        directory: absolute path of the run at that time.
        sections: of the configuration, with absolute paths.
        search_path: absolute folders of users' modules.
        inputs: files of data and models.
    """

    directory: str
    sections: Mapping[str, Any]
    search_path: Sequence[str]
    inputs: Sequence[InputFile]

    def moved_to(self, run: Path) -> RunOrigin:
        """The same origin, with files inside the run's directory at their present place."""
        return _parse(move_paths(asdict(self), self.directory, str(run)))

    def find_changed(self) -> list[str]:
        """Returns a sentence for every input file that is absent or differs."""
        found = []
        for each in self.inputs:
            try:
                now = _describe_file(Path(each.path))
            except OSError as error:
                found.append(f"{each.path}: {error.strerror}")
                continue
            if now != each:
                found.append(f"{each.path}: it is not the file with which the run was started")
        return found


def describe_origin(config: Config, directory: Path, search_path: Sequence[str]) -> RunOrigin:
    """Collects the origin at the beginning of a run.

    Raises:
        OSError: if an input cannot be read.
    """
    from hf_algorithms.config import build_sections

    sections = _locate(build_sections(config))
    return RunOrigin(
        directory=str(directory),
        sections=sections,
        search_path=[os.path.abspath(each) for each in search_path],
        inputs=[_describe_file(path) for path in sorted(set(_list_files(sections)))],
    )


def write_origin(directory: RunDirectory, origin: RunOrigin) -> None:
    """Writes the origin into the run's directory.

    Raises:
        RunDirectoryError: if that cannot be written.
    """
    directory.write_text(ORIGIN, json.dumps(asdict(origin)) + "\n")


def read_origin(run: Path) -> RunOrigin:
    """Reads the origin, with paths inside the run adapted to the run's present place.

    Raises:
        CheckpointError: if it cannot be read.
    """
    path = run / ORIGIN
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8"))).moved_to(run.resolve())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}. Name the directory of a run") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise CheckpointError(
            f"{path}: does not say how the run was started. Restore it, or start the run again in another directory: "
            "--overwrite would remove its commits"
        ) from None


def _parse(body: Mapping[str, Any]) -> RunOrigin:
    origin = RunOrigin(**{**body, "inputs": [InputFile(**each) for each in body["inputs"]]})
    paths = [origin.directory, *origin.search_path, *(each.path for each in origin.inputs)]
    if not isinstance(body["sections"], Mapping) or any(b"\0" in os.fsencode(each) for each in paths):
        raise ValueError("sections or paths that are not any")
    return origin


def move_paths(value: Any, before: str, after: str) -> Any:
    """Returns JSON in which paths inside one folder are inside another."""
    if isinstance(value, Mapping):
        return {key: move_paths(each, before, after) for key, each in value.items()}
    if isinstance(value, list):
        return [move_paths(each, before, after) for each in value]
    is_inside = isinstance(value, str) and (value == before or value.startswith(before + os.sep))
    return after + value[len(before) :] if is_inside else value


def _locate(value: Any, key: str = "") -> Any:
    """A value of a configuration in which paths of files that exist are absolute."""
    if isinstance(value, Mapping):
        return {name: _locate(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_locate(each, key) for each in value]
    is_path = key in _PATH_KEYS and isinstance(value, str) and value not in _MADE_TOKENIZERS
    return os.path.abspath(value) if is_path and _expand(value) else value


def _list_files(value: Any, key: str = "") -> Iterator[Path]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _list_files(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from _list_files(each, key)
    elif key in _PATH_KEYS and isinstance(value, str) and os.path.isabs(value):
        for path in map(Path, _expand(value)):
            yield from (each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _expand(value: str) -> list[str]:
    """The files of a path or pattern; none for a name on a hub."""
    if os.path.exists(value):
        return [value]
    return sorted(glob.glob(value, recursive=True)) if glob.has_magic(value) else []


def _describe_file(path: Path) -> InputFile:
    size = path.stat().st_size
    if size < _LARGE_BYTES:
        return InputFile(path=str(path), bytes=size, sha256=digest_file(path))
    found = hashlib.sha256()
    with path.open("rb") as file:
        found.update(file.read(_SAMPLE_BYTES))
        file.seek(-_SAMPLE_BYTES, os.SEEK_END)
        found.update(file.read(_SAMPLE_BYTES))
    return InputFile(path=str(path), bytes=size, sha256=found.hexdigest())
