"""A small process that ends a local cluster whose program was killed and could not end it itself.

Ray's own agents notice it after about a minute. Run as a script, so that it needs nothing but the standard library:
its argument is the cluster's session folder, and it acts when its standard input ends without a farewell. A process
belongs to the cluster if it has a file open in that folder: titles and environments are overwritten there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

__all__ = ["Watchdog"]

_FAREWELL = b"closed in order\n"
_PATIENCE_S = 30.0


class Watchdog:
    """Watches this process on behalf of a local cluster, on Linux; elsewhere it does nothing.

    Args:
        session_dir: the cluster's session folder.
    """

    def __init__(self, session_dir: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform == "linux":
            command = [sys.executable, "-E", "-S", __file__, session_dir]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def dismiss(self) -> None:
        """The cluster was ended in order."""
        if self._process is not None:
            self._process.communicate(_FAREWELL, timeout=_PATIENCE_S)
            self._process = None


def _members(session_dir: str) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and _has_file_in(name, session_dir):
            yield int(name)


def _has_file_in(pid: str, folder: str) -> bool:
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{fd}").startswith(folder + "/") for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _end(session_dir: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        members = list(_members(session_dir))
        if not members:
            return
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.2)


if __name__ == "__main__":
    if sys.stdin.buffer.read() != _FAREWELL:
        _end(sys.argv[1])
