"""The processes of an engine, found by their session, and the shared memory that they would leave behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["end_session", "find_segments"]

_SHARED = "/dev/shm"
_INODE = 4
"""Column of /proc/PID/maps."""


def find_segments(session: int) -> set[str]:
    """Files of shared memory that processes of the session have mapped.

    They are recognised by their inodes: a semaphore is mapped under a name that it loses before it gets its own.
    """
    mapped = set()
    for pid in _members(session):
        with suppress(OSError):  # it ended, or is nobody's to read
            maps = Path(f"/proc/{pid}/maps").read_text()
            mapped |= {int(line.split()[_INODE]) for line in maps.splitlines() if f"{_SHARED}/" in line}
    return {entry.path for entry in os.scandir(_SHARED) if entry.inode() in mapped} if mapped else set()


def end_session(session: int, segments: Iterable[str] = ()) -> None:
    """Kills every other process of the session, and removes their shared memory and the files named next to it."""
    found = find_segments(session) | set(segments)
    # Names first: an engine that notices that its children died ends the very process that cleans up here.
    for path in found:
        with suppress(FileNotFoundError):
            os.unlink(path)
    for pid in _members(session):
        if pid != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, ProcessLookupError):
            pid = int(entry.name)
            if os.getsid(pid) == session:
                members.append(pid)
    return members
