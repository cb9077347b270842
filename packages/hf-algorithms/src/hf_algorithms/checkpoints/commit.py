"""A committed step: a folder of files that `COMMIT` lists with sizes and digests, written last."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from hf_algorithms.atomic_files import sync, sync_tree, write_text
from hf_protocols import HybridFlowError
from hf_protocols.validation import show

__all__ = [
    "STEPS",
    "WARM_START",
    "CheckpointError",
    "Commit",
    "CommittedFile",
    "digest_file",
    "find_commits",
    "find_last_commit",
    "leaves_folder",
    "read_commit",
    "remove_step",
    "write_commit",
]

SCHEMA = 1
STEPS = "steps"
"""Folder of a run that holds its commits, by their iterations."""
WARM_START = "warm_start"
"""Folder of a run that holds the commits of its warm start until that is over, as a run of its own would."""
_COMMIT = "COMMIT"
_CHUNK_BYTES = 1 << 22


class CheckpointError(HybridFlowError):
    """A commit that cannot be used; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class CommittedFile:
    """A file of a commit, by its path in the step's folder."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Contents of `steps/<iteration>/COMMIT`.

    Attributes:
        folder: of the step.
        iteration: after which it was made.
        files: all others of the folder.
        ledger: samples by state.
        versions: of the libraries that wrote it.
    """

    folder: Path
    iteration: int
    files: tuple[CommittedFile, ...]
    ledger: Mapping[str, int]
    versions: Mapping[str, str]

    def verify(self) -> None:
        """Compares every file with its size and digest, before anything parses the file.

        Raises:
            CheckpointError: naming the first file that is absent or differs.
        """
        for each in self.files:
            path = self.folder / each.path
            try:
                size, digest = path.stat().st_size, digest_file(path)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}, and {self.folder / _COMMIT} lists it") from None
            if size != each.bytes:
                raise CheckpointError(f"{path}: has {size} bytes, {self.folder / _COMMIT} says {each.bytes}")
            if digest != each.sha256:
                raise CheckpointError(f"{path}: its SHA-256 is not the one in {self.folder / _COMMIT}")


def find_commits(run: Path) -> list[int]:
    """Returns the iterations of a run that are committed, in order."""
    steps = run / STEPS
    names = [path.name for path in steps.iterdir()] if steps.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and (steps / name / _COMMIT).is_file())


def find_last_commit(
    run: Path, check: Callable[[Commit], None] = lambda commit: None
) -> tuple[Commit | None, list[str]]:
    """Returns the newest commit whose files are as they were written, and a sentence for each that is not.

    Args:
        run: its directory.
        check: raises a CheckpointError for a commit that cannot be used for another reason.

    Raises:
        CheckpointError: if there are commits and none can be used.
    """
    problems: list[str] = []
    for iteration in reversed(find_commits(run)):
        try:
            commit = read_commit(run / STEPS / str(iteration))
            commit.verify()
            check(commit)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        return commit, problems
    if problems:
        raise CheckpointError(
            f"no commit can be used. {'. '.join(problems)}. Restore these files, or start another run"
        )
    return None, []


def read_commit(folder: Path) -> Commit:
    """Reads `COMMIT` of a step.

    Raises:
        CheckpointError: if it cannot be read, has another schema, or lists a path outside the folder.
    """
    path = folder / _COMMIT
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["schema"] != SCHEMA:
            raise CheckpointError(
                f"{path}: its schema is {show(body['schema'])}, this release reads {SCHEMA}. Resume with the release "
                "that wrote it"
            )
        files = tuple(CommittedFile(**each) for each in body["files"])
        if [each for each in files if (type(each.path), type(each.bytes), type(each.sha256)) != (str, int, str)]:
            raise ValueError("values of other kinds")
        commit = Commit(
            folder=folder,
            iteration=int(body["iteration"]),
            files=files,
            ledger={str(state): int(count) for state, count in body["ledger"].items()},
            versions=dict(body["versions"]),
        )
        outside = [each.path for each in files if leaves_folder(each.path)]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise CheckpointError(f"{path}: is not a commit") from None
    if outside:
        raise CheckpointError(f"{path}: lists {show(outside[0])}, which is outside its folder")
    return commit


def leaves_folder(path: str) -> bool:
    """True for a path that is not one of a file below the folder that it is relative to."""
    place = PurePosixPath(path)
    return place.is_absolute() or ".." in place.parts or not place.parts or not path.isprintable()


def write_commit(
    folder: Path,
    iteration: int,
    states: Iterable[CommittedFile],
    *,
    ledger: Mapping[str, int],
    versions: Mapping[str, str],
) -> Commit:
    """Makes a step durable: flushes its files and folders, and writes `COMMIT` last.

    Args:
        folder: of the step; all its files are listed.
        iteration: after which it was made.
        states: files whose digests their writers know.
        ledger: samples by state.
        versions: of the libraries.

    Raises:
        CheckpointError: for a file of a rank that this program does not see.
        OSError: when the file system refuses.
    """
    known = {each.path: each for each in states}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if absent := known.keys() - {path.relative_to(folder).as_posix() for path in paths}:
        raise CheckpointError(
            f"{folder / min(absent)}: a rank wrote it, and it is not there. Let run.output_dir be on a file system "
            "that all machines share, or set run.checkpoint_every = 0"
        )
    files: Sequence[CommittedFile] = [
        known.get(name := path.relative_to(folder).as_posix())
        or CommittedFile(path=name, bytes=path.stat().st_size, sha256=digest_file(path))
        for path in paths
    ]
    sync_tree(folder)
    body = {
        "schema": SCHEMA,
        "iteration": iteration,
        "files": [asdict(each) for each in files],
        "ledger": dict(ledger),
        "versions": dict(versions),
    }
    write_text(folder / _COMMIT, json.dumps(body, indent=2) + "\n")
    sync(folder.parent)
    return Commit(folder=folder, iteration=iteration, files=tuple(files), ledger=ledger, versions=versions)


def remove_step(folder: Path) -> None:
    """Removes a step, its `COMMIT` first: what is left of it is not taken for a commit."""
    (folder / _COMMIT).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def digest_file(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()
