"""Locks for what all threads of a process share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ProcessLock"]


class ProcessLock:
    """A lock that one thread at a time holds, and may take again. In a forked process it is free.

    Args:
        error: raised where another thread holds the lock for too long.
        message: of that error; `{timeout_s}` stands for the seconds that were waited.
    """

    def __init__(self, error: type[Exception], message: str) -> None:
        self._error, self._message = error, message
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def held(self, timeout_s: float = 600.0) -> Iterator[None]:
        """Holds the lock for the block.

        Args:
            timeout_s: how long to wait for another thread; 0: not at all.

        Raises:
            Exception: the lock's error.
        """
        lock = self._lock
        if not lock.acquire(timeout=timeout_s):
            raise self._error(self._message.format(timeout_s=f"{timeout_s:g}"))
        try:
            yield
        finally:
            lock.release()
