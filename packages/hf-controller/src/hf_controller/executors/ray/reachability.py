"""Looks from time to time at a process of another program, by the port at which it listens."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

__all__ = ["Reachability"]

_LOOK_S = 2.0
_TIMEOUT_S = 1.0
_MOST_FAILED = 3
"""Looks in a row: one may fail where a machine is busy."""


class Reachability:
    """Connects to a process every two seconds; `find_loss` may be called as often as one likes.

    Args:
        address: `host:port`.
        clock: seconds that only grow.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._clock = clock
        self._looked_s = clock()
        self._num_failed = 0
        self._reason = ""

    def find_loss(self) -> str:
        """Returns why the last connections failed, once several in a row did; else an empty string."""
        if self._num_failed < _MOST_FAILED and self._clock() - self._looked_s >= _LOOK_S:
            self._look()
            self._looked_s = self._clock()
        return self._reason if self._num_failed >= _MOST_FAILED else ""

    def _look(self) -> None:
        try:
            socket.create_connection(self._place, timeout=_TIMEOUT_S).close()
        except OSError as error:
            self._num_failed += 1
            self._reason = error.strerror or str(error)
        else:
            self._num_failed = 0
