"""A run's directory: every file is written whole or not at all, metrics line by line."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import EACCES, ENOTDIR
from pathlib import Path
from typing import Any, Protocol

from hf_algorithms.atomic_files import describe_refusal, replace_folder, sync, sync_tree, write_text
from hf_algorithms.json_text import format_json
from hf_algorithms.run_lock import RunLock, check_unlocked
from hf_protocols import ConfigError, HybridFlowError
from hf_protocols.validation import show

__all__ = ["ORIGIN", "RunDirectory", "RunDirectoryError", "RunListener", "is_run"]

ORIGIN = ".hybridflow-run"
"""Marks the directory of a run, and says what the run was started with."""
_FILES = (
    "config.toml", "plan.json", "metrics.jsonl", "summary.json", "trace.json", "report.html", "ledger.jsonl",
)  # fmt: skip
_FOLDERS = ("initial_model", "warm_model", "model", "samples", "steps", "warm_start", "replay", "tensorboard", "wandb")


def is_run(path: Path) -> bool:
    """True for the directory of a run, also one that was copied."""
    return (path / ORIGIN).is_file() or ((path / "config.toml").is_file() and not (path / "config.json").is_file())


class RunDirectoryError(HybridFlowError):
    """A file of the run that could not be written; what was written before is complete."""


class RunListener(Protocol):
    """Hears what a run writes into its directory."""

    def hear_metrics(self, row: Mapping[str, float | int]) -> None:
        """Called after each object of `metrics.jsonl`."""

    def hear_summary(self, body: dict[str, Any]) -> None:
        """Called after each `summary.json`."""


class RunDirectory:
    """Directory in which one run leaves its files. Nothing is written or removed before `begin`.

    Args:
        path: the directory.
        overwrite: replace the files of an earlier run that lies there; other files stay.
        resume: go on with the run that lies there; its files stay.

    Raises:
        ConfigError: if it cannot be written or is in use, is not empty and no earlier run may be replaced, or has no
            run to go on with.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self._given = path
        with self._refusing():
            self.path = path.resolve()
            is_used = self.path.exists() and any(self.path.iterdir())
            check_unlocked(self.path)
            place = next(each for each in (self.path, *self.path.parents) if each.exists())
            if not place.is_dir():
                raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
            _try_to_make(self.path)
            is_ours = (self.path / ORIGIN).is_file()
        if resume and not is_ours:
            raise ConfigError(
                f"--resume {self._given}: {self.path} is not the directory of a run. Name its run.output_dir"
            )
        self._resumes = resume
        if is_used and not resume and not (overwrite and is_ours):
            label = f"run.output_dir={str(self.path)!r}"
            if not is_ours:
                raise ConfigError(f"{label} is not empty and not the directory of a run. Choose another directory")
            raise ConfigError(
                f"{label} is not empty. Choose another directory, or --overwrite to replace an earlier run"
            )
        self._has_begun = False
        self._lock: RunLock | None = None
        self._listeners: list[RunListener] = []

    @property
    def has_begun(self) -> bool:
        """True once `begin` was called; before, nothing is written or removed."""
        return self._has_begun

    @property
    def exists(self) -> bool:
        """False once somebody has removed the directory, with its commits."""
        return self.path.is_dir()

    def require(self, name: str) -> None:
        """Refuses to write into a directory that somebody has removed; what it held is lost.

        Args:
            name: of the file or folder to write.

        Raises:
            RunDirectoryError: if it is not there.
        """
        if not self.exists:
            raise RunDirectoryError(
                f"{name} cannot be written: run.output_dir={str(self.path)!r} was removed while the run went on. "
                "Start the run again"
            )

    def check_inputs(self, paths: Mapping[str, str | None]) -> None:
        """Refuses inputs that `begin` would remove.

        Args:
            paths: key of the configuration and path, or None.

        Raises:
            ConfigError: naming the key.
        """
        own = [self.path / name for name in (*_FILES, *_FOLDERS)]
        for key, value in paths.items():
            resolved = Path(value).resolve() if value else None
            if resolved and any(resolved == each or each in resolved.parents for each in own if each.exists()):
                raise ConfigError(
                    f"{key}={show(value)} belongs to the run that would be replaced. Change run.output_dir"
                )

    def begin(self) -> None:
        """Makes the directory and removes what an earlier run left; call it once the new run's inputs were found good.

        The run holds the directory's lock until `close`.

        Raises:
            ConfigError: if the directory cannot be made, then nothing was; or if another run writes there.
        """
        missing = _missing(self.path)
        with self._refusing():
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = self._lock or RunLock(self.path)
                if not self._resumes:  # until it has contents, no run can go on here
                    (self.path / ORIGIN).write_bytes(b"")
            except OSError:
                _remove_empty(missing)
                raise
        self._has_begun = True
        if not self._resumes:
            self.clear()

    def clear(self, *, keeps: Sequence[str] = ()) -> None:
        """Removes what an earlier run left, or an earlier part of this one that has no commit.

        Args:
            keeps: files and folders that stay.
        """
        with self._reporting("the earlier run"):
            for name in set(_FILES).difference(keeps):
                (self.path / name).unlink(missing_ok=True)
            for name in set(_FOLDERS).difference(keeps):
                _empty(self.path / name)
            (self.path / "metrics.jsonl").touch()

    def truncate(self, name: str, size: int) -> None:
        """Cuts a file to its first bytes.

        Raises:
            RunDirectoryError: if it has fewer.
        """
        with self._reporting(name):
            path = self.path / name
            if size == 0 and not path.exists():
                return
            if path.stat().st_size < size:
                raise RunDirectoryError(f"{path}: has become shorter than {size} bytes. Restore it")
            os.truncate(path, size)
            sync(path)

    def remove(self, name: str) -> None:
        """Removes a file or a folder."""
        with self._reporting(name):
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def measure(self) -> dict[str, int]:
        """Returns the bytes of the files that grow, by their names; 0 for one that does not exist yet."""
        files = [self.path / "metrics.jsonl", self.path / "ledger.jsonl", *(self.path / "samples").glob("*.jsonl")]
        return {each.relative_to(self.path).as_posix(): each.stat().st_size if each.exists() else 0 for each in files}

    def close(self) -> None:
        """Lets another run use the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def listen(self, listener: RunListener) -> None:
        """Lets a listener hear what is written from now on."""
        self._listeners.append(listener)

    def write_text(self, name: str, text: str) -> None:
        """Writes a file atomically.

        Raises:
            RunDirectoryError: if it cannot be written, as all other methods do.
        """
        with self._reporting(name):
            write_text(self.path / name, text)

    def write_json(self, name: str, body: Any) -> None:
        """Writes JSON atomically, indented, NaN and infinity as null."""
        self.write_text(name, json.dumps(_without_nonfinite(body), indent=2) + "\n")
        if name == "summary.json":
            for listener in self._listeners:
                listener.hear_summary(body)

    def append_metrics(self, metrics: Mapping[str, float | int]) -> None:
        """Adds one object to `metrics.jsonl` at once, NaN and infinity as null."""
        known = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.append_line("metrics.jsonl", json.dumps(known))
        for listener in self._listeners:
            listener.hear_metrics(metrics)

    def append_line(self, name: str, line: str, *, must_last: bool = True) -> None:
        """Adds a line to a file. With `must_last` it is on the disk when this returns, and so are all lines before it.

        Without, it is lost if the machine ends, not if the process does.
        """
        with self._reporting(name), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            if must_last:
                os.fsync(file.fileno())

    def append_samples(self, iteration: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Adds objects to `samples/<iteration>.jsonl`, one for each response, which name the iteration."""
        lines = [format_json({"iteration": iteration, **each}) + "\n" for each in samples]
        if not lines:
            return
        path = self.path / "samples" / f"{iteration}.jsonl"
        with self._reporting("samples"):
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
                file.flush()
                os.fsync(file.fileno())  # a commit counts its bytes

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """Yields a folder to fill; it replaces the folder `name` if the block ends without an error."""
        fresh = self.path / f".{name}.part"
        with self._reporting(name):
            shutil.rmtree(fresh, ignore_errors=True)
            yield fresh
            sync_tree(fresh)
            replace_folder(fresh, self.path / name)

    def write_files(self, folder: Path, files: Mapping[str, bytes]) -> None:
        """Writes files of a folder that `replacing` yields, by their paths in it."""
        with self._reporting(folder.name):
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"run.output_dir={str(self._given)!r} cannot be written: {reason}. Choose another directory"
            ) from None

    @contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        self.require(name)
        try:
            yield
        except OSError as error:
            self.require(name)
            raise RunDirectoryError(
                f"{name} in run.output_dir={str(self.path)!r} cannot be written: {describe_refusal(error)}. "
                "Free some space or choose another directory"
            ) from error


def _without_nonfinite(value: Any) -> Any:
    """The value with None for each number that JSON has no word for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _without_nonfinite(each) for name, each in value.items()}
    return [_without_nonfinite(each) for each in value] if isinstance(value, list | tuple) else value


def _try_to_make(path: Path) -> None:
    """Makes a folder and one in it, and removes both: what permissions allow, a file system may still refuse."""
    missing = _missing(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(prefix=".hybridflow-", dir=path))
    except FileNotFoundError:  # what /proc says
        raise PermissionError(EACCES, "its file system takes no new files") from None
    finally:
        _remove_empty(missing)


def _empty(folder: Path) -> None:
    """Removes a folder, or what is in one that a user has linked to; commits that stayed would be taken for newer ones.

    Raises:
        OSError: when the file system refuses.
    """
    if not folder.is_symlink():
        if folder.exists():
            shutil.rmtree(folder)
        return
    for each in folder.iterdir() if folder.is_dir() else ():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


def _missing(path: Path) -> list[Path]:
    """The folders to make, innermost first."""
    return [each for each in (path, *path.parents) if not each.exists()]


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
