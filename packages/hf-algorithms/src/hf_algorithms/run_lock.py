"""Locks of runs: one program at a time writes into a directory, and one thread of a program at a time trains."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from hf_protocols import ConfigError
from hf_protocols.process_lock import ProcessLock

__all__ = ["LOCK", "RunLock", "check_unlocked", "training_alone"]

LOCK = ".lock"
"""Name of the file; it stays when the run has ended. The operating system's lock on it is what counts."""

_ATTEMPTS, _PAUSE_S = 5, 0.05
"""Of taking a lock: one that only looks holds it for a moment."""

_TRAINING = ProcessLock(
    ConfigError,
    "another thread of this process is training, and random numbers, torch's settings and Ray are those of the whole "
    "process. Train after it ends, or in a process of its own",
)


class RunLock:
    """Holds `RUN/.lock` until `release` or the end of the process, however that ends.

    The file says who holds it: host, pid and start time.

    Args:
        directory: of the run; it exists.

    Raises:
        ConfigError: while another program, or another run of this one, holds it.
        OSError: if the file cannot be made or the file system has no locks.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / LOCK
        self._file: IO[str] = path.open("a+", encoding="utf-8")
        with ExitStack() as undo:
            undo.callback(self._file.close)
            _lock(self._file, fcntl.LOCK_EX, directory)
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "start_time": time.time()}
            self._file.truncate(0)
            self._file.write(json.dumps(holder) + "\n")
            self._file.flush()
            undo.pop_all()
        # a process that was forked would hold the lock on beyond the end of this one
        os.register_at_fork(after_in_child=partial(_close, weakref.ref(self._file)))

    def release(self) -> None:
        """Lets another run in."""
        self._file.close()


@contextmanager
def training_alone() -> Iterator[None]:
    """Runs the block, or a function that is decorated, unless another thread of this process is in such a block.

    Raises:
        ConfigError: if another thread is. Blocks of one thread may nest.
    """
    with _TRAINING.held(timeout_s=0.0):
        yield


def check_unlocked(directory: Path) -> None:
    """Refuses a directory into which a program writes a run; makes nothing.

    Raises:
        ConfigError: naming the program.
    """
    with suppress(OSError), (directory / LOCK).open(encoding="utf-8") as file:
        _lock(file, fcntl.LOCK_SH, directory)


def _lock(file: IO[str], kind: int, directory: Path) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            if attempt < _ATTEMPTS - 1:
                time.sleep(_PAUSE_S)
        else:
            return
    file.seek(0)
    raise ConfigError(
        f"run.output_dir={str(directory)!r}: {_describe(file.read())} writes there. Wait for its end, or choose "
        "another directory"
    )


def _close(reference: weakref.ref[IO[str]]) -> None:
    file = reference()
    if file is not None:
        file.close()


def _describe(text: str) -> str:
    """The holder of a lock, as far as its file says."""
    try:
        body = json.loads(text)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(body["start_time"]))
        return f"a run of process {body['pid']:d} on {body['host']!s} that started {since}"
    except (ValueError, LookupError, TypeError, OverflowError, OSError, RecursionError):
        return "another run"
