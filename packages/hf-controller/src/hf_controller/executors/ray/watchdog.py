"""A small process that ends a local cluster whose program could not do it, and removes what the cluster wrote.

Ray's own agents notice only after about a minute that a program was killed or has crashed. The watchdog starts before
the cluster, so it knows the cluster by its session folder: Ray names it after the time and the program's process id. A
process belongs to the cluster if it has a file open in that folder: titles and environments are overwritten there.

Run as a script, so that it needs nothing but the standard library.
"""

from __future__ import annotations

import datetime
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

__all__ = ["Watchdog", "find_sessions"]

_CLOSED, _KEEP_LOGS = b"closed", b"closed, keep logs"
_PATIENCE_S = 30.0
_END_S = 5.0
_LATEST = "session_latest"


class Watchdog:
    """Watches this process on behalf of the local cluster that it is about to start, on Linux; elsewhere nothing.

    Args:
        temp_dir: folder that the cluster's session folder will be in.

    Raises:
        OSError: if no process can be started.
    """

    def __init__(self, temp_dir: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions = (temp_dir, os.getpid(), _name_of_now())
        if sys.platform == "linux":
            command = [sys.executable, "-E", "-S", __file__, *map(str, self._sessions)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def find_sessions(self) -> list[str]:
        """The folders of the clusters that this process started since."""
        return find_sessions(*self._sessions)

    def dismiss(self, *, keeps_logs: bool = False) -> None:
        """The cluster was ended in order; its folder goes, too.

        Args:
            keeps_logs: leave the folder, whose logs an error names.
        """
        if self._process is not None:
            process, self._process = self._process, None
            with suppress(subprocess.TimeoutExpired):  # it goes on by itself
                process.communicate(_KEEP_LOGS if keeps_logs else _CLOSED, timeout=_END_S)


def find_sessions(temp_dir: str, program: int, since: str) -> list[str]:
    """Session folders of clusters that a program started, by Ray's names for them.

    Args:
        temp_dir: where they are.
        program: the program's process id, which an earlier program may have had.
        since: the name of a folder that was made before any of them.
    """
    names: Sequence[str] = ()
    with suppress(OSError):
        names = os.listdir(temp_dir)
    mine = [name for name in names if name.endswith(f"_{program}") and since <= name < _LATEST]
    return [os.path.join(temp_dir, name) for name in mine]


def _name_of_now() -> str:
    return datetime.datetime.now().strftime("session_%Y-%m-%d_%H-%M-%S_%f")


def _members(sessions: Sequence[str], program: int) -> Iterator[int]:
    folders = tuple(f"{session}/" for session in sessions)
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (os.getpid(), program) and _has_file_in(name, folders):
            yield int(name)


def _has_file_in(pid: str, folders: tuple[str, ...]) -> bool:
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{fd}").startswith(folders) for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _await_last_word(program: int) -> bytes | None:
    """Returns the program's last word, or None once the program is gone, even if a forked process holds the pipe."""
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        if os.getppid() != program:
            return None
    return sys.stdin.buffer.read() or None


def _end(temp_dir: str, program: int, since: str, *, kills: bool) -> None:
    """Waits until the cluster has no process, and removes its folders."""
    deadline_s = time.monotonic() + _PATIENCE_S
    num_empty = 0
    while time.monotonic() < deadline_s and num_empty < 2:
        members = list(_members(find_sessions(temp_dir, program, since), program))
        num_empty = 0 if members else num_empty + 1
        for pid in members if kills else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for session in find_sessions(temp_dir, program, since):
        while os.path.exists(session):  # a process that is ending may write to it once more
            shutil.rmtree(session, ignore_errors=True)
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.02)
        latest = os.path.join(temp_dir, _LATEST)
        with suppress(OSError):
            if os.readlink(latest) == session:
                os.unlink(latest)


if __name__ == "__main__":
    temp_dir, program, since = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    last_word = _await_last_word(program)
    if last_word != _KEEP_LOGS:
        _end(temp_dir, program, since, kills=last_word is None)
