"""Waiting on the controller: in slices, so that signals are seen, and with a deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from hf_controller.failures import CLOSED
from hf_controller.signals import SignalGuard
from hf_protocols import PoolError

__all__ = ["Waiter"]

# Ray looks for signals once a second, and loses some of the exceptions that their handlers raise.
_SLICE_S = 0.2


class Waiter:
    """Waits for Ray objects.

    Args:
        guard: knows of signals that arrive meanwhile.
    """

    def __init__(self, guard: SignalGuard) -> None:
        self._guard = guard
        self._closed = False

    def close(self) -> None:
        """Refuse everything from now on: Ray would start a cluster, or join one that runs here, to serve it."""
        self._closed = True

    def get_all(self, handles: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """The values if all are there within a moment, else none: most calls need no second question."""
        self.check_open()
        with self._guard.watching():
            try:
                return list(ray.get(list(handles), timeout=_SLICE_S if timeout_s is None else min(_SLICE_S, timeout_s)))
            except RayError:
                pass
        return []

    def wait_slice(self, handles: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """The handles that are ready once all are, or a moment has passed."""
        self.check_open()
        slice_s = _SLICE_S if timeout_s is None else max(0.0, min(_SLICE_S, timeout_s))
        with self._guard.watching():
            if not handles:
                time.sleep(slice_s)
                return []
            return list(ray.wait(list(handles), num_returns=len(handles), timeout=slice_s)[0])

    def check_open(self) -> None:
        """Refuse to go on after `close`."""
        if self._closed:
            raise PoolError(CLOSED)
