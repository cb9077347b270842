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

    def get_all(self, handles: Sequence[Any], timeout_s: float) -> list[Any]:
        """The values if all are there within a moment, else none: most calls need no second question."""
        self._check_open()
        with self._guard.watching():
            try:
                return list(ray.get(list(handles), timeout=min(_SLICE_S, timeout_s)))
            except RayError:
                pass
        return []

    def wait_some(self, handles: Sequence[Any], timeout_s: float) -> list[Any]:
        """The handles that are ready once all are, or some are and a moment has passed; none if none is in time."""
        self._check_open()
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            with self._guard.watching():
                ready = ray.wait(list(handles), num_returns=len(handles), timeout=max(0.0, min(_SLICE_S, left_s)))[0]
            if ready or left_s <= 0:
                return list(ready)

    def _check_open(self) -> None:
        if self._closed:
            raise PoolError(CLOSED)
