"""End of a process of this machine: its exit code or signal, although another process is its parent."""

from __future__ import annotations

import os
import select
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["ProcessEnd", "ProcessWatch", "is_stopped"]

_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO of linux/pidfd.h, with 64 bytes; its exit status since Linux 6.15
_INFO = struct.Struct("=QQ11Ii")
_WANTS_EXIT = 1 << 3


class ProcessEnd(NamedTuple):
    """End of a process; nothing is set where the system does not say.

    Attributes:
        exit_code: of a process that ended by itself.
        signal: the number of the signal that ended it.
        out_of_memory: whether the kernel ended a process of this container for its memory meanwhile.
    """

    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False

    @classmethod
    def of_status(cls, status: int, *, out_of_memory: bool = False) -> ProcessEnd:
        """Reads a wait status, as `os.waitpid` answers it."""
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return cls(signal=number, out_of_memory=out_of_memory and number == signal.SIGKILL)
        return cls(exit_code=os.WEXITSTATUS(status))

    def __str__(self) -> str:
        if self.exit_code is not None:
            return f"exit code {self.exit_code}"
        if self.signal is None:
            return ""
        with suppress(ValueError):
            return f"signal {self.signal} ({signal.Signals(self.signal).name}{', out of memory' * self.out_of_memory})"
        return f"signal {self.signal}"


class ProcessWatch:
    """Watches a process of this machine, on Linux.

    Raises:
        OSError: if it is gone already, or the system has no such watch.
    """

    def __init__(self, pid: int) -> None:
        if sys.platform != "linux":
            raise OSError("processes of others are watched on Linux only")
        self._pid = pid
        self._file = os.pidfd_open(pid)
        self._num_kills = _count_oom_kills()
        self._end: ProcessEnd | None = None

    def find_end(self) -> ProcessEnd | None:
        """Returns the process's end; None while it lives."""
        if self._end is None and select.select([self._file], [], [], 0)[0]:
            self._end = self._read_end()
            os.close(self._file)
        return self._end

    def is_stopped(self) -> bool:
        """Returns True if a signal such as SIGSTOP holds the process."""
        return is_stopped(self._pid)

    def kill(self) -> None:
        """Ends it at once, stopped or not."""
        if self.find_end() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file, signal.SIGKILL)

    def close(self) -> None:
        """Lets go of it."""
        if self._end is None:
            self._end = ProcessEnd()
            os.close(self._file)

    def _read_end(self) -> ProcessEnd:
        import fcntl

        asked = bytearray(_INFO.size)
        struct.pack_into("=Q", asked, 0, _WANTS_EXIT)
        try:
            fcntl.ioctl(self._file, _GET_INFO, asked)
        except OSError:  # an older kernel
            return ProcessEnd()
        mask, *_, status = _INFO.unpack(asked)
        if not mask & _WANTS_EXIT:
            return ProcessEnd()
        return ProcessEnd.of_status(status, out_of_memory=_count_oom_kills() > self._num_kills)


def is_stopped(pid: int) -> bool:
    """Returns True if a signal such as SIGSTOP holds a process of this machine."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"


def _count_oom_kills() -> int:
    """Processes of this container that the kernel ended for their memory."""
    with suppress(OSError, ValueError):
        for line in Path("/sys/fs/cgroup/memory.events").read_text(encoding="utf-8").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
